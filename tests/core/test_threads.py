"""One thread learns, others predict; a forked child has a copy of its own."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cabi import TESTS, build_with_installed, run

from kbt_edge import Head, KbtError

PROBE = np.full(6, 0.5, np.float32)


def new_head(**settings: Any) -> Head:
    return Head(np.ones((1, 6)), hidden=(12,), prior_var=(1e-3, 1.0), noise_var=1e-2, **settings)


def stream(count: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    for h in rng.standard_normal((count, 6)).astype(np.float32):
        yield h, np.array([h @ np.arange(6)], np.float32)


def bits(head: Any) -> bytes:
    p = head.predict(PROBE)
    return bytes(p.mean.tobytes() + p.cov.tobytes() + p.total_var.tobytes())


@pytest.mark.parametrize(
    "settings",
    [{}, {"covariance": "full"}, {"covariance": "diagonal", "dtype": "float64"}, {"noise": "adaptive"}],
    ids=str,
)
def test_a_reader_predicts_bit_for_bit_what_the_head_does(settings: dict[str, Any]) -> None:
    head = new_head(**settings)
    reader = head.reader()
    assert bits(reader) == bits(head)
    for i, (h, y) in enumerate(stream(20), 1):
        head.update(h, y)
        assert bits(reader) == bits(head)
        assert reader.samples == head.samples == i
    assert "20 samples" in repr(reader)


def test_a_reader_follows_what_else_changes_a_head() -> None:
    matrix = Head(np.ones((2, 3)), noise_var=[[1.0, 0.5], [0.5, 1.0]])
    reader = matrix.reader()
    before = matrix.to_bytes()
    matrix.update(np.ones(3), np.zeros(2))
    learned = matrix.to_bytes()
    matrix.restore(before)
    assert (reader.predict(np.ones(3)).cov == matrix.predict(np.ones(3)).cov).all()
    assert reader.samples == 0
    matrix.restore(learned)
    assert (reader.predict(np.ones(3)).cov == matrix.predict(np.ones(3)).cov).all()
    assert reader.samples == 1


def test_a_reader_does_not_disturb_the_prediction_that_waits_to_be_observed() -> None:
    alone, watched = new_head(), new_head()
    reader = watched.reader()
    for h, y in stream(10):
        alone.predict(h)
        alone.observe(y)
        watched.predict(h)
        reader.predict(-3 * h)
        watched.observe(y)
    assert alone.to_bytes() == watched.to_bytes()


def test_readers_that_are_gone_cost_nothing_and_the_rest_go_on() -> None:
    head = new_head()
    kept = head.reader()
    for h, y in stream(10):
        head.reader().predict(h)
        gc.collect()
        head.update(h, y)
    assert bits(kept) == bits(head)


def test_bad_input_to_a_reader_is_rejected_by_name() -> None:
    reader = new_head().reader()
    with pytest.raises(ValueError, match=r"h: expected shape \(6,\)"):
        reader.predict(np.ones(5))
    with pytest.raises(ArithmeticError, match="h: expected finite"):
        reader.predict(np.full(6, np.nan))


def test_python_threads_never_see_a_half_learned_posterior() -> None:
    samples = list(stream(3000))
    alone = new_head()
    noted = [bits(alone)]
    for h, y in samples:
        alone.update(h, y)
        noted.append(bits(alone))
    head, done, torn = new_head(), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            seen = bits(reader := readers[threading.current_thread().name])
            if seen != noted[reader.samples]:
                torn.append(reader.samples)

    readers = {name: head.reader() for name in ("a", "b")}
    threads = [threading.Thread(target=read, name=name) for name in readers]
    for thread in threads:
        thread.start()
    for h, y in samples:
        head.update(h, y)
    done.set()
    for thread in threads:
        thread.join()
    assert torn == []
    assert head.to_bytes() == alone.to_bytes()


def test_a_large_head_lets_other_threads_run_and_rejects_them_itself() -> None:
    head = Head(np.ones((1, 20)), hidden=(40,), covariance="full", prior_var=(1e-3, 1.0), noise_var=1e-2)
    reader, rejections, done = head.reader(), [], threading.Event()
    rng = np.random.default_rng(0)
    deadline = time.monotonic() + 60.0  # on a busy machine the two may take turns for seconds

    def learn() -> None:
        while not rejections and time.monotonic() < deadline:
            with contextlib.suppress(KbtError):  # this thread may be the one that is rejected
                head.update(rng.standard_normal(20).astype(np.float32), np.zeros(1, np.float32))
        done.set()

    thread = threading.Thread(target=learn)
    thread.start()
    while not done.is_set():
        reader.predict(np.ones(20))  # has memory of its own: never rejected
        try:
            head.predict(np.ones(20, np.float32))
        except KbtError as error:
            rejections.append(str(error))
    thread.join()
    assert "head: expected one thread at a time" in rejections[0]
    assert "head.reader()" in rejections[0]
    assert bits_of_large(head) == bits_of_large(reader)


def bits_of_large(head: Any) -> bytes:
    return bytes(head.predict(np.ones(20)).cov.tobytes())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_learns_in_a_copy_of_its_own() -> None:
    head = new_head()
    samples = list(stream(20))
    for h, y in samples[:10]:
        head.update(h, y)
    before = head.to_bytes()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        for h, y in samples[10:]:
            head.update(h, y)
        os.write(write_end, head.to_bytes())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        childs = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert head.to_bytes() == before
    for h, y in samples[10:]:
        head.update(h, y)
    assert head.to_bytes() == childs


@pytest.mark.host_only("needs a C compiler")
def test_threads_in_c_never_see_a_half_learned_posterior(tmp_path: Path) -> None:
    program = build_with_installed("cc", TESTS / "readers.c", tmp_path / "readers", "-pthread")
    told = json.loads(run(program, 20_000, 0))
    assert told["torn"] == 0
    assert told["versions_seen"] > 10
    assert told["updates"] > 10
