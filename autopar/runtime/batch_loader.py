"""`BatchLoader`: reads this rank's rows of each global batch, the same batches on any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from autopar.errors import AutoparError
from autopar.runtime.module import ParallelModule

__all__ = ["BatchLoader"]


class BatchLoader:
    """Loader of global batches, of which each rank reads its rows alone: `for batch in loader: module(**batch)`.

    The batches are those that one process reads, in its order, whatever the mesh. A batch that would be smaller is left
    out at the end. The part of the batch is that of the module's latest call, or of its example inputs.

    Parameters:
        module: the module that the batches are for.
        dataset: samples by number, or a stream of them, which all ranks read alike.
        batch_size: samples in a global batch.
        shuffle: shuffle samples by number anew in every epoch.
        seed: of the shuffles, the same on all ranks.
        dim: the dim of samples, as `graph` names it.
        options: those of `torch.utils.data.DataLoader`, such as `num_workers` and `collate_fn`.
    """

    def __init__(
        self,
        module: ParallelModule,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        dim: str = "batch",
        **options: Any,
    ) -> None:
        self.module = module
        self.dim = dim
        index, count = module.batch_shard(dim)
        if batch_size % count:
            raise AutoparError(
                f"the global batch of {batch_size} samples has no {count} equal parts, as the layout makes of {dim}\n"
                f"fix: a batch_size that {count} divides; or give every rank whole batches, of any DataLoader"
            )
        self._sampler: DistributedSampler[Any] | None = None
        if isinstance(dataset, IterableDataset):
            if shuffle:
                raise AutoparError("a stream cannot be shuffled by number\nfix: shuffle it in the dataset itself")
            dataset = _StreamRows(dataset, batch_size, index, count)
        else:
            self._sampler = DistributedSampler(dataset, count, index, shuffle, seed, drop_last=True)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_size // count, sampler=self._sampler, drop_last=True, **options
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield keyword arguments of a call, which stand for the whole batch."""
        for rows in self._loader:
            yield self.module.from_rows(self.dim, **self._named(rows))

    def __len__(self) -> int:
        """Return the number of batches of an epoch; raises `TypeError` for a stream."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch; call it before each one, as of `DistributedSampler`."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def _named(self, rows: Any) -> dict[str, Tensor]:
        if isinstance(rows, Mapping):
            return dict(rows)
        inputs = self.module._plans.current().inputs
        values = (rows,) if isinstance(rows, Tensor) else tuple(rows)
        if len(values) != len(inputs):
            raise AutoparError(
                f"a sample has {len(values)} values, and the module {len(inputs)} inputs: {', '.join(inputs)}\n"
                "fix: a dataset or collate_fn of dicts, by the names of the inputs"
            )
        return dict(zip(inputs, values, strict=True))


class _StreamRows(IterableDataset[Any]):
    """Rows of this rank in a stream; each worker process has every so-many-th batch, as `DataLoader` takes them."""

    def __init__(self, stream: Iterable[Any], batch_size: int, index: int, count: int) -> None:
        self.stream, self.batch_size, self.index, self.count = stream, batch_size, index, count

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        own, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        samples = iter(self.stream)
        number = 0
        while len(batch := list(islice(samples, self.batch_size))) == self.batch_size:
            if number % workers == own:
                yield from batch[self.index :: self.count]
            number += 1
