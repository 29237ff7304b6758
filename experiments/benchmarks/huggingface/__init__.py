"""Models of Hugging Face Transformers with random weights: this attention in place of their own, beside the others that
Transformers offers.

    python -m experiments.benchmarks.huggingface models --model llama
"""
