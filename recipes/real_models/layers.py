"""An allocator: each layer keeps what its heads win in `global`, split evenly among them.

`--methods kvp+recipes.real_models.layers:Layers`, for engines that could hold another count in each
layer and the same in all its heads; none that kvp serves with can.
"""

from torch import Tensor

from kvp.ranking import Request
from policies.allocators.global_budget import Global
from policies.allocators.per_layer import apportion_layers


class Layers:
    """Global budgets per layer, equal counts inside."""

    name = "layers"

    def allocate(self, request: Request) -> Tensor:
        """Tokens of each head: [L, H] int64, sum `request.total`."""
        return apportion_layers(Global().allocate(request).sum(1).double(), request)
