"""ONNX to C: runs the C generator in a separate process.

    python -I _generate NAME KERNELS PATHS TEMPLATES < model.onnx > trunk.c

The generator imports a top-level package called ``shared``, reads untrusted files, and uses as much memory and time as
they require. A separate process isolates the user's process from that: it finds the generator's packages first (PATHS,
one folder per line), has limits, and may crash. For a file that cannot be translated it exits with code 3 and the
reason on standard error. KERNELS is ``fast`` or ``small``: how matrix products are written.

    translator.py   checks the file, drops its text, infers its shapes
    rewrite.py      other nodes with the same result, which the generator translates better, or at all
    templates/      C for matrix products and layer normalisation in place of the generator's
    text.py         repairs of the generated text; arrays that are copies become pointers
    memory.py       arrays that are not needed at the same time share memory

In that process this package has another name and no ``kbt_edge`` above it, so its imports are relative.
"""

from __future__ import annotations

from .limits import FOLDED, MAX_MEMORY, REJECTED, RejectedError
from .translator import Translator

__all__ = ["FOLDED", "MAX_MEMORY", "REJECTED", "RejectedError", "Translator"]
