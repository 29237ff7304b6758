import torch
from torch import nn

from experiments.pathx.data.packing import LEVELS
from experiments.pathx.model.intensity import STEP, SmoothEmbedding, fitted, hats


def test_the_shares_of_a_level_add_to_one_and_fall_on_its_neighbours():
    shares = hats()
    assert shares.shape == (LEVELS, (LEVELS - 1) // STEP + 1)
    assert torch.allclose(shares.sum(1), torch.ones(LEVELS))
    assert (shares > 0).sum(1).max() == 2
    assert torch.equal(shares[::STEP], torch.eye(shares.shape[1]))


def test_neighbouring_levels_have_neighbouring_features():
    torch.manual_seed(0)
    smooth, rows = SmoothEmbedding(2, 32), nn.Embedding(LEVELS + 2, 32)
    for table, steep in ((smooth.table(), False), (rows.weight * 32**-0.5, True)):
        between_neighbours = (table[1:LEVELS] - table[: LEVELS - 1]).norm(dim=1)
        far = (table[0] - table[LEVELS - 1]).norm()
        assert (between_neighbours.max() < 0.3 * far) != steep


def test_registers_have_rows_of_their_own():
    smooth = SmoothEmbedding(2, 8)
    assert torch.equal(smooth(torch.tensor([LEVELS, LEVELS + 1])), smooth.registers)


def test_a_smooth_table_is_fitted_exactly_and_a_rough_one_as_closely_as_possible():
    torch.manual_seed(0)
    smooth = SmoothEmbedding(3, 16)
    found = fitted(smooth.table().detach())
    assert torch.allclose(found["rows"], smooth.rows, atol=1e-5) and torch.equal(found["registers"], smooth.registers)
    rough = torch.randn(LEVELS, 16)
    best = fitted(rough)["rows"]
    error = (hats() @ best - rough)[1:].pow(2).sum()
    for row in range(1, len(best)):
        other = best.clone()
        other[row] += 0.05
        assert (hats() @ other - rough)[1:].pow(2).sum() > error
    assert torch.equal(best[0], rough[0])
