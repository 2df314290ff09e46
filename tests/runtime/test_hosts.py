"""Hosts that train or call a model: 20 steps on two ranks equal one process, and files are those of the library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import autopar
from examples.hf import hf
from examples.lora_llama import lora_llama
from tests.runtime.launcher import launch
from tests.runtime.training import error_of
from tests.test_docs import ROOT, blocks

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install autopar[test]")
pytest.importorskip("accelerate", reason="needs accelerate, which Trainer runs on: pip install autopar[test]")

STEPS, BATCH, SEQ = 20, 8, 12
Rows = list[dict[str, Tensor]]


def rows() -> Rows:
    """Samples with different numbers of targets."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 64, (STEPS * BATCH, SEQ), generator=draw)
    labels = ids.clone()
    labels[::3, :4] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def collate(found: Rows) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in found]) for name in found[0]}


def llama() -> Any:
    torch.manual_seed(0)
    return hf("llama", 8, SEQ, vocab_size=64, train=True, dropout=0.0)[0]


def adapted() -> Any:
    torch.manual_seed(0)
    return lora_llama(batch=8, seq=SEQ, rank=4, peft=True, vocab_size=64)[0]


@contextmanager
def host_environment() -> Iterator[None]:
    """What `torchrun` and `accelerate launch --cpu` set, and no state of an earlier Accelerator."""
    from accelerate.state import AcceleratorState, GradientState

    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 29500}
    texts = {name: str(value) for name, value in names.items()}
    with patch.dict(os.environ, {**texts, "MASTER_ADDR": "localhost", "ACCELERATE_USE_CPU": "true"}):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def parallel(model: Any, layout: str | None, local: bool = False) -> Any:
    """The model on all ranks; on one process itself."""
    if layout is None:
        return model
    ranks = dist.get_world_size()
    mesh = f"dp=1,tp={ranks}" if layout == "megatron" else f"dp={ranks}"
    example = collate(rows()[: BATCH // ranks if local else BATCH])
    return autopar.parallelize(model, mesh, example, layout=layout, local_inputs=local)


def trainer(model: Any, folder: str, local: bool = False, callbacks: Any = (), **options: Any) -> Any:
    """A Trainer of 20 steps of `BATCH` samples."""
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH // dist.get_world_size() if local else BATCH,
        max_steps=STEPS,
        logging_steps=1,
        use_cpu=True,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        seed=3,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    made = transformers.Trainer(model, arguments, train_dataset=rows(), callbacks=list(callbacks))
    if isinstance(model, autopar.ParallelModule) and not local:
        # All ranks get the same batches. On GPUs Trainer does this by itself.
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        made.accelerator.state.device_mesh = mesh
    return made


def logged(made: Any, name: str = "loss") -> list[float]:
    return [float(entry[name]) for entry in made.state.log_history if name in entry]


def train(
    layout: str | None, local: bool, accumulation: int, folder: str, average: bool = True
) -> tuple[list[float], list[float]]:
    options = {"gradient_accumulation_steps": accumulation, "average_tokens_across_devices": average}
    with host_environment():
        model = parallel(llama(), layout, local)
        made = trainer(model, folder, local, **options)
        made.train()
        assert layout is None or made.model_wrapped is model  # no DDP around it
        return logged(made), logged(made, "grad_norm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "local", "accumulation", "average"),
    [
        ("fsdp", False, 2, True),
        ("megatron", False, 1, True),
        ("ddp", True, 1, True),
        ("zero1", True, 1, True),
        ("zero1", True, 2, True),
        ("fsdp", True, 2, True),
        ("ddp", True, 3, False),
    ],
)
def test_trainer_takes_the_steps_of_one_process(
    layout: str, local: bool, accumulation: int, average: bool, tmp_path: Path
) -> None:
    (expected,) = launch(train, None, False, accumulation, str(tmp_path / "one"), ranks=1)
    for found in launch(train, layout, local, accumulation, str(tmp_path / "two"), average, ranks=2):
        for some, others in zip(found, expected, strict=True):
            assert len(some) == STEPS
            torch.testing.assert_close(some, others, rtol=2e-3, atol=2e-5)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)


def optimizer_states() -> Any:
    """The callback of the page."""
    names: dict[str, Any] = {}
    for block in blocks((ROOT / "docs/hosts.md").read_text()):
        if "class OptimizerStates" in block.body:
            exec(block.body, names)
    return names["OptimizerStates"]()


def train_and_resume(layout: str, folder: str) -> list[list[float]]:
    found = []
    for resumed in (None, str(Path(folder, "checkpoint-10"))):
        with host_environment():
            callbacks = [optimizer_states()]
            saving = {"save_strategy": "steps", "save_steps": 10, "save_only_model": True}
            made = trainer(parallel(llama(), layout), folder, callbacks=callbacks, **saving)
            made.train(resume_from_checkpoint=resumed)
            found.append(logged(made))
    return found


@pytest.mark.slow
def test_trainer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    for once, resumed in launch(train_and_resume, "fsdp", str(tmp_path), ranks=2):
        torch.testing.assert_close(resumed, once, rtol=1e-6, atol=1e-6)
        assert len(once) == STEPS


def accelerate_loop(layout: str | None, local: bool, accumulation: int) -> list[float]:
    from accelerate import Accelerator

    with host_environment():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = parallel(llama(), layout, local)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        size = BATCH // dist.get_world_size() if local else BATCH
        loader: Any = DataLoader(rows(), size, collate_fn=collate)  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        prepared = accelerator.prepare(model, optimizer, scheduler)
        assert layout is None or prepared[0] is model
        model, optimizer, scheduler = prepared
        if local:  # a loader that Accelerate prepares gives each rank rows of its own
            loader = accelerator.prepare(loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "local", "accumulation"), [("fsdp", False, 1), ("megatron", False, 2), ("ddp", True, 2)]
)
def test_accelerate_takes_the_steps_of_one_process(layout: str, local: bool, accumulation: int) -> None:
    (expected,) = launch(accelerate_loop, None, False, accumulation, ranks=1)
    for found in launch(accelerate_loop, layout, local, accumulation, ranks=2):
        assert len(found) == STEPS
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def wrong_uses() -> dict[str, str]:
    from accelerate import Accelerator

    found = {}
    with host_environment():
        model = parallel(llama(), "ddp")
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        found["cast"] = error_of(lambda: accelerator.prepare(model))
    with host_environment():
        loader = Accelerator(cpu=True).prepare(DataLoader(rows(), BATCH, collate_fn=collate))  # type: ignore[arg-type]
        batch = next(iter(loader))
        found["rows of its own"] = error_of(lambda: model(**batch))
    found["module"] = error_of(lambda: model.set_input_embeddings(torch.nn.Embedding(70, 48)))
    return found


@pytest.mark.slow
def test_what_a_host_cannot_do_is_an_error_with_the_fix() -> None:
    for found in launch(wrong_uses, ranks=2):
        assert "mixed_precision='bf16'" in found["cast"]
        assert "parallelize(..., precision='bf16')" in found["cast"]
        assert "local_inputs=True" in found["rows of its own"]
        assert "Accelerate" in found["rows of its own"]
        assert "change the model, and parallelize it then" in found["module"]


def generate(layout: str) -> dict[str, bool]:
    model = llama().eval()
    module = parallel(model, layout).eval()
    prompt = torch.stack([row["input_ids"] for row in rows()[:2]])
    found = {}
    for cached in (False, True):
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "use_cache": cached}
        mask = torch.ones_like(prompt)
        mask[0, :3] = 0
        expected = model.generate(prompt, attention_mask=mask, **options)
        found[f"cache={cached}"] = torch.equal(expected, module.generate(prompt, attention_mask=mask, **options))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_generated_tokens_are_those_of_one_process(layout: str) -> None:
    assert launch(generate, layout, ranks=2) == [{"cache=False": True, "cache=True": True}] * 2


def save_and_load(layout: str, folder: str) -> dict[str, bool]:
    model, kind = llama(), transformers.LlamaForCausalLM
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    module = parallel(model, layout)
    module.save_pretrained(folder, max_shard_size="50KB")
    dist.barrier()
    loaded = kind.from_pretrained(folder)
    # Weights of the files on the first rank alone: it scatters them.
    first = dist.get_rank() == 0
    with torch.device("cpu" if first else "meta"):
        other = kind.from_pretrained(folder) if first else kind(loaded.config)
    again = parallel(other.train(), layout)
    batch = collate(rows()[:BATCH])
    return {
        "in parts": Path(folder, "model.safetensors.index.json").exists(),
        "same": all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items()),
        "config": loaded.config.architectures == ["LlamaForCausalLM"],
        "goes on": torch.equal(again(**batch).loss, module(**batch).loss),
        "names": isinstance(module, kind) and module.num_parameters() == model.num_parameters(),
        "kinds": module.device == model.device and module.dtype == model.dtype,
        "norms": sum(isinstance(one, type(model.model.norm)) for one in module.modules()) == 5,
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_saved_files_are_those_of_transformers(layout: str, tmp_path: Path) -> None:
    for found in launch(save_and_load, layout, str(tmp_path), ranks=2):
        assert found == dict.fromkeys(found, True)


def train_adapters(layout: str | None, folder: str) -> tuple[list[float], bool]:
    with host_environment():
        model = adapted()
        base, module = model.get_base_model(), parallel(model, layout)
        made = trainer(module, folder, save_strategy="steps", save_steps=STEPS, save_only_model=True)
        made.train()
    if layout is None:
        return logged(made), True
    from peft import PeftModel, get_peft_model_state_dict

    whole = module.full_state_dict()
    loaded = PeftModel.from_pretrained(
        transformers.LlamaForCausalLM(base.config), str(Path(folder, f"checkpoint-{STEPS}"))
    )
    expected = get_peft_model_state_dict(loaded)
    same = all(
        torch.equal(tensor, expected[name.replace(".default", "")]) for name, tensor in whole.items() if "lora" in name
    )
    return logged(made), same and len(expected) == 28


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_adapters_of_peft_train_and_are_saved(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install autopar[test]")
    ((expected, _),) = launch(train_adapters, None, str(tmp_path / "one"), ranks=1)
    for found, is_saved in launch(train_adapters, layout, str(tmp_path / "two"), ranks=2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert is_saved


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(("<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **tokens)


def assert_same_losses(loop: Callable[[str | None, str], list[float]], layout: str, folder: Path) -> None:
    """Raise unless a loop has the losses of one process on two ranks under a layout."""
    (expected,) = launch(loop, None, str(folder / "one"), ranks=1)
    for found in launch(loop, layout, str(folder / "two"), ranks=2):
        assert len(found) == STEPS
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def fine_tune(layout: str | None, folder: str) -> list[float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class Tuner(SFTTrainer):  # type: ignore[misc]
        compute_loss = transformers.Trainer.compute_loss

    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(6, SEQ, (STEPS * BATCH,), generator=draw).tolist()
    texts = [" ".join(f"w{i}" for i in torch.randint(61, (length,), generator=draw)) for length in lengths]
    with host_environment():
        arguments = SFTConfig(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            learning_rate=1e-2,
            disable_tqdm=True,
        )
        module = parallel(llama(), layout)
        data = Dataset.from_dict({"text": texts})
        made = Tuner(module, arguments, train_dataset=data, processing_class=tokenizer())
        if layout is not None:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
            made.accelerator.state.device_mesh = mesh
        made.train()
        return logged(made)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_supervised_fine_tuning_of_trl_takes_the_steps_of_one_process(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl and datasets, which are not in autopar[test]: pip install trl")
    assert_same_losses(fine_tune, layout, tmp_path)


def switch_adapters(layout: str) -> dict[str, bool]:
    model, batch = adapted(), collate(rows()[:BATCH])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    module = parallel(model, layout)
    found = {}

    def compare(name: str) -> None:
        loss, expected = module(**batch).loss, model(**batch).loss
        found[name] = torch.allclose(loss, expected, rtol=1e-6)
        found[f"{name} alone"] = not torch.allclose(loss, torch.tensor(seen[-1])) if seen else True
        seen.append(loss.item())

    seen: list[float] = []
    compare("with adapters")
    with model.disable_adapter(), module.disable_adapter():
        compare("without")
    compare("with them again")
    return found


@pytest.mark.slow
def test_adapters_are_switched_off_and_on() -> None:
    pytest.importorskip("peft", reason="needs peft: pip install autopar[test]")
    for found in launch(switch_adapters, "fsdp", ranks=2):
        assert found == dict.fromkeys(found, True)


def fit_with_lightning(layout: str | None, folder: str) -> list[float]:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses: list[float] = []

    class Training(lightning.LightningModule):  # type: ignore[misc]
        def configure_model(self) -> None:
            if not hasattr(self, "model"):  # Lightning calls it again
                self.model = parallel(llama(), layout)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    ranks = dist.get_world_size()
    options: dict[str, Any] = {"devices": 1}
    if layout is not None:
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
        options = {"strategy": strategy, "devices": ranks}
    with host_environment():
        made = lightning.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            use_distributed_sampler=False,
            gradient_clip_val=0.5,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        made.fit(Training(), DataLoader(rows(), BATCH, collate_fn=collate))  # type: ignore[arg-type]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_lightning_takes_the_steps_of_one_process(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning, which is not in autopar[test]: pip install lightning")
    assert_same_losses(fit_with_lightning, layout, tmp_path)
