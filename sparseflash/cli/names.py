"""The names that options take and help lists, apart from what they name, which needs PyTorch."""

PRECISIONS = ("bf16", "fp16", "fp32")
PEERS = {
    "sdpa": "PyTorch's SDPA, dense",
    "sdpa-mask": "PyTorch's SDPA, mask in memory",
    "flex": "FlexAttention",
    "fa4": "FlashAttention-4",
}
AS_BITS = "mask as bits"  # added to FlexAttention's name where no `mask_mod` for the mask is known
SUFFIXES = {".mask": "mask", ".npz": "scipy", ".npy": "dense"}  # formats with files of their own
# Formats that are stored as tensors by name, in a file of torch.save.
STORED = ("sdpa", "torch-sparse", "flex", "fa4", "flashinfer", "flashmask", "deepspeed")
FORMATS = (*SUFFIXES.values(), *STORED)
PICTURES = (".png", ".pdf", ".svg")
