"""When the plugin is on, and that it leaves vLLM as it is where it is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest

from asyncbook.integrations import vllm as plugin
from asyncbook.integrations.vllm_book import MODE_VARIABLE


@pytest.fixture(autouse=True)
def _is_off_again() -> Iterator[None]:
    yield
    plugin.switch_off()


def is_on() -> bool:
    from vllm.config import SchedulerConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    places = (GPUModelRunner._bookkeeping_sync, SchedulerConfig.get_scheduler_cls)
    replaced = [hasattr(place, "replaces") for place in places]
    assert len(set(replaced)) == 1
    return replaced[0]


def register(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str | None) -> str:
    """What is logged when vLLM loads the plugin with the variable at `mode`."""
    if mode is None:
        monkeypatch.delenv(MODE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(MODE_VARIABLE, mode)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.asyncbook"):
        plugin.register()
    return caplog.text


@pytest.mark.parametrize("mode", ["embedded", "sidecar"])
def test_it_says_that_it_is_on(mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logged = register(monkeypatch, caplog, mode)
    assert is_on()
    assert f"asyncbook is on ({mode}), checked with vLLM 0.32.0" in logged
    register(monkeypatch, caplog, mode)  # vLLM may load it again
    plugin.switch_off()
    assert not is_on()


@pytest.mark.parametrize("mode", [None, "", "off"])
def test_it_is_off(mode: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert register(monkeypatch, caplog, mode) == ""
    assert not is_on()


def test_a_mode_that_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert "expected one of embedded, sidecar" in register(monkeypatch, caplog, "on")
    assert not is_on()


def test_another_version_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    logged = register(monkeypatch, caplog, "embedded")
    assert "WARNING" in logged
    assert "vLLM 0.33.1 is installed, it was checked with 0.32.0" in logged
    assert not is_on()


def test_a_patched_build_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    monkeypatch.setattr(RejectionSampler, "parse_output", lambda ids: ids)
    assert "a patched build?" in register(monkeypatch, caplog, "embedded")
    assert not is_on()


def test_the_default_schedulers_are_replaced_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config import SchedulerConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    from asyncbook.integrations.vllm_scheduler import BookAsyncScheduler, BookScheduler

    register(monkeypatch, caplog, "embedded")
    config = SchedulerConfig(max_model_len=64, is_encoder_decoder=False)
    config.scheduler_cls, config.async_scheduling = None, False
    assert config.get_scheduler_cls() is BookScheduler
    config.async_scheduling = True
    assert config.get_scheduler_cls() is BookAsyncScheduler
    config.scheduler_cls = Scheduler
    assert config.get_scheduler_cls() is Scheduler


def test_vllm_finds_it() -> None:
    assert "asyncbook.integrations.vllm:register" in [
        point.value for point in entry_points(group="vllm.general_plugins")
    ]
