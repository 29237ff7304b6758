import torch

from experiments.training import cuda_graphs


class HostGraph:
    """Repeats at every replay the calls that a graph would have recorded."""

    def __init__(self, model, warm_up, compute, device, pool=None, gradients=None):
        warm_up()
        self.model, self.compute, self.places = model, compute, gradients

    def replay(self):
        for parameter, place in zip(self.model.parameters(), self.places, strict=True):
            parameter.grad = place
        result = self.compute()
        cuda_graphs.move_gradients(self.model, self.places)
        return result


def use_host_graphs(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "GradientGraph", HostGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
