"""Models of Transformers with random weights: this attention beside those that Transformers offers.

python -m experiments.benchmarks.huggingface models --model llama
"""
