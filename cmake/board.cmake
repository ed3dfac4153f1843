# Toolchain of tools/wheel.py: KBT_MACHINE is what `uname -m` says on the board, CC and CXX in the environment are
# compilers for it.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KBT_MACHINE)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "${KBT_MACHINE}")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY) # probes are not linked: that alone would build the C++ run time once more
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF) # and so would LTO
set(PYBIND11_USE_CROSSCOMPILING ON) # or the module gets the suffix of the machine that builds it
