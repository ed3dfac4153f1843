"""The latency harness: ``kbt-edge bench`` measures this board, ``kbt-edge doctor`` says what to change on it."""
