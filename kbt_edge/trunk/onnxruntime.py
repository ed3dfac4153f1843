"""Runs a trunk with onnxruntime: any operator, any provider."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kbt_edge.errors import BackendError, BundleError, MissingError, RangeError
from kbt_edge.trunk.inputs import Float32, Slot

__all__ = ["NOT_AVAILABLE_FOR", "Onnxruntime"]

MAX_RUN_MEMORY: Final = 2**30  # of all trunks together, because a small file can ask for any amount
FIRST_RUN_SECONDS: Final = 60
NOT_AVAILABLE_FOR: Final = ("armv7l", "armv6l")  # 32-bit ARM, for which no wheels are published


class Onnxruntime:
    """One thread, all optimisations, inputs and output bound to fixed memory: the fastest way at batch 1."""

    name: Final = "onnxruntime"

    def __init__(
        self,
        data: bytes,
        providers: Sequence[Any] | None,
        slots: tuple[Slot, ...],
        output_name: str,
        output_shape: tuple[int, ...],
        h: Float32,
    ) -> None:
        ort: Any = _import()
        self.version = str(ort.__version__)
        wanted = list(providers) if providers is not None else ["CPUExecutionProvider"]
        names = [provider if isinstance(provider, str) else provider[0] for provider in wanted]
        for provider in names:
            if provider not in ort.get_available_providers():
                raise RangeError(f"providers: expected some of {ort.get_available_providers()}, got {provider!r}")
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4  # errors are raised; nothing is logged to the terminal
        # Load the bytes in the format that was checked, and in bounded memory. Constants are not folded before the
        # first run, because a few bytes of a file can expand to fill any memory.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        if _bounded_arena(ort):
            options.add_session_config_entry("session.use_env_allocators", "1")
        try:
            self._session = ort.InferenceSession(
                data, options, providers=wanted, disabled_optimizers=["ConstantFolding"]
            )
            self._binding = self._session.io_binding()
        except Exception as error:  # onnxruntime has a dozen exception types for a file it cannot run
            raise BundleError(f"onnxruntime cannot load this trunk: {error}") from error
        self._slots, self._h = slots, h
        # A rejected output must not reach h, so the network writes to another buffer.
        self._output: Float32 = np.zeros(output_shape, np.float32)
        self._rows: Float32 = self._output.reshape(h.shape)
        self._binding.bind_output(output_name, "cpu", 0, np.float32, output_shape, self._output.ctypes.data)
        self._bind_inputs()
        # On the CPU a bound input is read in place. For another device, binding copies it there.
        self._bind_every_time = any(provider != "CPUExecutionProvider" for provider in names)
        self._run_once(ort.RunOptions())

    def _run_once(self, options: Any) -> None:
        """The first run, with a time limit. Without loops, later runs do not take much longer."""
        timer = threading.Timer(FIRST_RUN_SECONDS, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            self._session.run_with_iobinding(self._binding, options)
        except Exception as error:
            if not timer.is_alive():
                raise BundleError(f"the trunk did not finish within {FIRST_RUN_SECONDS} s") from None
            raise BackendError(f"onnxruntime failed to run the trunk: {error}") from error
        finally:
            timer.cancel()

    def _bind_inputs(self) -> None:
        for slot in self._slots:
            spec, buffer = slot.spec, slot.buffer
            self._binding.bind_input(spec.name, "cpu", 0, buffer.dtype, spec.shape, buffer.ctypes.data)

    def run(self) -> int:
        if any(slot.rejection() is not None for slot in self._slots):
            return 1
        try:
            if self._bind_every_time:
                self._bind_inputs()
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"onnxruntime failed to run the trunk: {error}") from error
        if not np.isfinite(self._rows).all():
            return 2
        np.copyto(self._h, self._rows)
        return 0


@functools.cache
def _bounded_arena(ort: Any) -> bool:
    """One limited arena for all trunks of this process. False if this version of onnxruntime does not support it."""
    try:
        place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(place, ort.OrtArenaCfg({"max_mem": MAX_RUN_MEMORY}))
    except Exception:  # one of onnxruntime's exceptions; everything works without the limit
        return False
    return True


def _import() -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # telemetry would use the network from within a control loop
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        machine = platform.machine()
        if machine in NOT_AVAILABLE_FOR:
            raise MissingError(
                f"onnxruntime does not exist for {machine}; backend='compiled' runs the trunk without it, "
                "from a library built here or found in the cache"
            ) from error
        raise MissingError("onnxruntime is not installed (pip install onnxruntime)") from error
