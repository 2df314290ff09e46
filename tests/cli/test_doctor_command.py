"""`autopar doctor`: what it finds, and a check that fails where two processes cannot run."""

from __future__ import annotations

import pytest

from autopar.cli import doctor, main, verify_processes
from autopar.errors import VerifyError

LINES = ("check", "versions", "devices", "threads", "cluster", "network")


@pytest.mark.slow
def test_two_processes_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert tuple(line.split()[0] for line in out.splitlines()) == LINES
    assert "two processes over Gloo agree with one to " in out


def _found(relative: float) -> verify_processes.Verification:
    return verify_processes.Verification((verify_processes.Difference("output 0", relative),), 3)


@pytest.mark.parametrize(
    ("relative", "code", "said"),
    [
        (1e-15, 0, "agree with one to 1e-15 (3 collectives"),
        (1e-3, 1, "do NOT agree with one: output 0 by 1e-03"),
        (None, 1, "two processes over Gloo failed: no port"),
    ],
)
def test_the_check_decides(
    relative: float | None,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verify(task: verify_processes.VerifyTask, ranks: int, seconds: float) -> verify_processes.Verification:
        assert (ranks, task.mesh) == (2, "dp=2")
        if relative is None:
            raise VerifyError("no port")
        return _found(relative)

    monkeypatch.setattr(verify_processes, "verify", verify)
    assert main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert tuple(line.split()[0] for line in lines) == LINES
    assert said in lines[0]


def test_a_host_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "no.such.host.invalid")
    said = dict(doctor.findings())["network"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert said == "the host name no.such.host.invalid does not resolve: autopar sets the interface lo for Gloo"
