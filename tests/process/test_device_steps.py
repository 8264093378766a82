"""The short form of `stress/test_device_long.py`: every id and frame of a few hundred steps from a fake device."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.conftest import MakeBook
from tests.device import CONFIG, run_device_steps


@pytest.mark.parametrize("max_in_flight", [1, 2, 5])
def test_steps_from_a_device(make_book: MakeBook, max_in_flight: int) -> None:
    options = CONFIG | {"max_model_len": 2000, "max_in_flight": max_in_flight, "device": f"fake:{max_in_flight}"}
    run_device_steps(make_book(**options), 300, seed=max_in_flight)


def test_the_run_tells_a_late_write_apart(make_book: MakeBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the copy on the caller's stream the next step's ids get into this one: the run says so."""
    from asyncbook.device.fake import FakeDevice

    book = make_book(**CONFIG, max_model_len=2000, device="fake:9", fresh=True)
    if book.sidecar_pid is None:
        return  # an embedded book fetches the ids
    monkeypatch.setattr(FakeDevice, "follow", lambda self, stream: None)
    with pytest.raises(AssertionError, match="seed 1"):
        run_device_steps(book, 300, seed=1)
