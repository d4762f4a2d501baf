"""A stand-in for the models of PEFT, which is not installed for tests."""

from types import SimpleNamespace

from torch import nn


class PeftModel(nn.Module):
    """The shape of peft.PeftModel; `config` is that of an adapter outside of the model, if any."""

    def __init__(self, model, **config):
        super().__init__()
        self.base_model, self._adapters_disabled = model, False
        if config:
            self.active_peft_config = SimpleNamespace(**config)

    def get_base_model(self):
        return self.base_model

    def generate(self, **options):
        return self.base_model.generate(**options)
