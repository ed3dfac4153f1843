# Finds Eigen's headers and offers them as kbt_eigen, a system include so that our warnings stay ours.
# First the wheel of the build requirement cmeel-eigen, whose files lie in <site-packages>/cmeel.prefix, then whatever the
# system has.
if(NOT Eigen3_DIR AND NOT EIGEN3_INCLUDE_DIR)
  if(NOT Python_EXECUTABLE)
    find_program(Python_EXECUTABLE NAMES python3 python)
  endif()
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import os, sys; print(';'.join(os.path.join(p, 'cmeel.prefix') for p in sys.path if os.path.isdir(os.path.join(p, 'cmeel.prefix', 'include', 'eigen3'))))"
      OUTPUT_VARIABLE _kbt_cmeel_prefixes
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
find_path(
  EIGEN3_INCLUDE_DIR Eigen/Core
  HINTS ${_kbt_cmeel_prefixes}
  PATH_SUFFIXES include/eigen3 eigen3)
if(NOT EIGEN3_INCLUDE_DIR)
  message(FATAL_ERROR "Eigen 3.4 headers not found: pip install cmeel-eigen, install libeigen3-dev, or pass "
                      "-DEIGEN3_INCLUDE_DIR=...")
endif()
add_library(kbt_eigen INTERFACE)
target_include_directories(kbt_eigen SYSTEM INTERFACE "${EIGEN3_INCLUDE_DIR}")
