"""What model.py calls: attention, activations and the loss, by the fastest kernel that this machine has."""

from deskgpt.kernels.loss import chunked_cross_entropy
from deskgpt.kernels.ops import causal_attention, gelu_tanh, masked_attention, relu2
from deskgpt.kernels.recompute import recomputed

__all__ = ["causal_attention", "chunked_cross_entropy", "gelu_tanh", "masked_attention", "recomputed", "relu2"]
