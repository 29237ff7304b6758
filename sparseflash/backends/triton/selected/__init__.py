"""Kernels for attention to tokens that each query has chosen: `sparseflash.selected_tokens` calls them.

- `lists`: sorts the lists of chosen tokens.
- `loads`: gathers keys and values, and rows of heads.
- `forward`: out and lse.
- `score_gradients`: dq, and the weights and gradients of the scores of a chunk of queries.
- `places`: the place of each (token, query) of a chunk in a list sorted by token.
- `token_sums`: the rows that each query adds to its tokens, and their sums in that order.
- `tiles`: the sizes of tiles.
- `sizes`: what the kernels of one call share.
- `api`: launches the forward, and says what the kernels refuse; `gradients`: launches the backward.
"""
