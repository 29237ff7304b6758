"""Models of Hugging Face Transformers with random weights: this attention in place of their own, beside the others that
Transformers offers. Are logits and gradients those of "eager", how many tokens a second, and how fast do they generate?

    python -m experiments.benchmarks.huggingface models --model llama

May import `harness`, `measurements`, `timing`, `training`, the library and `sparseflash.huggingface`.
"""
