"""Models of Hugging Face Transformers with random weights: this attention in place of their own, beside the others that
Transformers offers. Compares logits and gradients with "eager", and measures tokens per second and generation.

    python -m experiments.benchmarks.huggingface models --model llama
"""
