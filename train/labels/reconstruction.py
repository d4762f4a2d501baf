"""KVzip's scores: the attention a token gets while the model repeats its prompt.

They need passes of the model, so `kvp-collect --labels` computes and stores them
(`kvp.hf.trace.LABEL_PASSES`); the answer's tokens have none.
"""

from train.labels.label import Label

KVZIP = Label(stored="kvzip")
KVZIP_PLUS = Label(stored="kvzip_plus")
