"""Tree nodes in, logits out: the forwards, which of them serves a model, and CUDA graphs of them."""
