"""Lower bounds of reshards never exceed the exact prices, and are close to them where one collective does."""

from __future__ import annotations

import random

import pytest

from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.network import Network
from autopar.cost.reshard_costs import ReshardCosts
from autopar.mesh import Mesh
from autopar.sharding.reshard.reshard import ScaledReshards
from autopar.sharding.sharding import Sharding
from autopar.solver.model.reshard_bounds import ReshardBounds
from tests.simulation import drawn_sharding

ITEMSIZE, LAUNCH = 2.0, 1e-5


class Prices:
    """Exact prices and bounds on one mesh."""

    def __init__(self, mesh: str, cluster: str) -> None:
        made = Mesh(mesh)
        self.axes = tuple(made.whole)
        self.network = Network(load_cluster(cluster), made.whole, made.links)
        self.costs = ReshardCosts(self.network, LAUNCH)
        self.bounds = ReshardBounds(self.costs, self.axes)
        self.reshards = ScaledReshards(made.whole)

    def exact(self, sizes: tuple[int, ...], source: Sharding, target: Sharding) -> tuple[float, float]:
        """Return the seconds of device and host."""
        steps = self.reshards.of(sizes, source, target)
        assert steps is not None
        costs = self.costs.value_steps(steps, ITEMSIZE)
        return sum(cost.seconds for cost in costs), sum(cost.host_seconds for cost in costs)


MESHES = [
    ("dp=8,tp=8", "h100"),
    ("pod=2,dp=4,tp=8", "h100"),
    ("dp=3,cp=2,tp=4", "h100"),
    ("pod=4,dp=8,tp=4", "gb200"),
    ("dp=2,cp=2,tp=2", "local-cpu"),
    ("pod=2@network,dp=4,tp=2", "a100-80"),
    ("a=2,b=2,c=2,d=2", "h100"),
]


def holds(mesh: str, cluster: str, tensors: int) -> int:
    """Check random pairs of shardings; return how many bounds are above half of the price."""
    rng, prices = random.Random(mesh), Prices(mesh, cluster)
    close = 0
    for _ in range(tensors):
        sizes = tuple(rng.choice([1, 2, 6, 16, 24, 25, 96, 1023, 4096, 12288]) for _ in range(rng.randint(1, 4)))
        sources, targets = ([drawn_sharding(rng, prices.axes, len(sizes)) for _ in range(8)] for _ in range(2))
        bounds = prices.bounds.between(sizes, ITEMSIZE, sources, targets)
        seconds = bounds.seconds + bounds.latency
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                exact, host = prices.exact(sizes, source, target)
                assert seconds[i, j] <= exact * (1 + 1e-9), f"{sizes} {source} -> {target}"
                assert bounds.host_seconds[i, j] <= host, f"{sizes} {source} -> {target}"
                close += seconds[i, j] > 0.5 * exact > 0.0
    return close


@pytest.mark.parametrize(("mesh", "cluster"), MESHES[:2])
def test_no_bound_exceeds_the_price(mesh: str, cluster: str) -> None:
    assert holds(mesh, cluster, 5) > 5


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "cluster"), MESHES)
def test_no_bound_exceeds_the_price_of_more_tensors(mesh: str, cluster: str) -> None:
    assert holds(mesh, cluster, 60) > 50


def test_one_collective_has_its_price() -> None:
    """The bound of a gather and of a scattered sum leaves out the time to fill the pipeline, and one rank's part."""
    prices = Prices("pod=2,dp=4,tp=8", "h100")
    sizes, whole = (8192, 4096), Sharding(((), ()))
    split = Sharding((("tp",), ()))
    for source, target in ((split, whole), (Sharding(((), ()), frozenset({"tp"})), split)):
        found = prices.bounds.between(sizes, ITEMSIZE, [source], [target])
        price = prices.network.library_seconds
        (step,) = prices.reshards.of(sizes, source, target) or ()
        size = step.numel * ITEMSIZE
        per_byte = (price(step.kind, step.axes, 2 * size) - price(step.kind, step.axes, size)) / size
        assert 0.7 * per_byte * size < found.seconds[0, 0] <= per_byte * size


def test_another_order_of_the_axes_is_sent() -> None:
    prices = Prices("pod=2,dp=4,tp=8", "h100")
    source, target = Sharding((("pod", "dp"),)), Sharding((("dp", "pod"),))
    assert prices.bounds.between((8192,), ITEMSIZE, [source], [target]).seconds[0, 0] > 0.0
    assert not any(values.any() for values in prices.bounds.between((8192,), ITEMSIZE, [source], [source]))
