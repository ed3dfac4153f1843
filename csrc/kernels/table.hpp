// table.hpp - the loops of one instruction set, behind function pointers.
#pragma once

#include "grouped.hpp"
#include "lane_ud.hpp"
#include "normal.hpp"

namespace kbt {

// The same functions for both layouts of UD factors. A number for each lane is passed as W numbers.
template <class T, Index W>
struct FactorLoops {
  void (*weigh)(const UD<T, W> &s, const T *f, const T *g, T *out);  // f^T D g
  void (*gain)(const UD<T, W> &s, const T *f, T *b);                 // S a for f = U^T a
  void (*diagonal_times)(const UD<T, W> &s, const ConstVectorView<T> &c, T *scratch, T *out);
  void (*trace_times)(const UD<T, W> &s, const MatrixView<T> &C, T *column, T *out);
  void (*rank_one)(const UD<T, W> &s, const T *f, const T *lambda, const T *share, bool may_grow, T *memory);
  void (*advance)(Index M, T *f, T *memory);
  void (*add)(Index M, T *y, const T *a, const T *x);  // y += a x
};

template <class T>
struct Table {
  FactorLoops<T, kLanes> lanes;
  FactorLoops<T, 1> column;
  // algebra.hpp and normal.hpp
  void (*axpy)(T *y, T a, const T *x, Index n);
  void (*columns_times)(const MatrixView<T> &W, const ConstVectorView<T> &z, VectorView<T> &u);
  void (*gated_rows_times)(const MatrixView<T> &W, const ConstVectorView<T> &x, const ConstVectorView<T> &gate,
                           VectorView<T> &y);
  void (*relu_units)(const ConstVectorView<T> &u, VectorView<T> &var, T *z, T *gate);
  int (*update_variances)(const ConstVectorView<T> &z, const ConstVectorView<T> &r, const T *lambda, T least, T *d,
                          T *mean);
  // lane_ud.hpp and column_ud.hpp
  void (*project_lanes)(const LaneUD<T> &first, Index blocks, const T *z, T *f, Index f_stride);
  void (*dot_lanes)(Index M, Index count, const T *x, const T *z, T *out);
  void (*project_rows)(const LaneUD<T> &s, Index rows, const T *z, Index z_stride, T *f);
  void (*forward_lanes)(const LaneUD<T> &first, Index blocks, const T *z, T *f, T *var, T *out);
  void (*rank_one_before)(const LaneUD<T> &s, const T *f, const T *lambda, const T *share, T *memory, const T *next_z,
                          T *next_f);
  int (*update_lanes)(const LaneUD<T> &first, Index blocks, const RowUpdate<T> &row);
  void (*project_column)(const ColumnUD<T> &s, const T *z, T *f);
  // grouped.hpp
  void (*project_group)(const ColumnUD<T> &s, Index n, const T *z, T *f);
  void (*weigh_group)(const ColumnUD<T> &s, Index n, const T *f, Index count, T *weighted, T *out);
  void (*input_group)(const ColumnUD<T> &s, Index n, const T *C, Index rows, T *column, T *X, T *out);
};

namespace KBT_TARGET {

template <class T>
constexpr Table<T> kTable = {{weigh_lanes<T>, gain_lanes<T>, diagonal_times_lanes<T>, trace_times<T, kLanes>,
                              rank_one_lanes<T>, advance<T, kLanes>, add_lanes<T>},
                             {weigh_column<T>, gain_column<T>, diagonal_times_column<T>, trace_times<T, 1>,
                              rank_one_column<T>, advance<T, 1>, add_column<T>},
                             axpy<T>,
                             columns_times<T>,
                             gated_rows_times<T>,
                             relu_units<T>,
                             update_variances<T>,
                             project_lanes<T>,
                             dot_lanes<T>,
                             project_rows<T>,
                             forward_lanes<T>,
                             rank_one_before<T>,
                             update_lanes<T>,
                             project_column<T>,
                             project_group<T>,
                             weigh_group<T>,
                             input_group<T>};

}  // namespace KBT_TARGET

#ifdef KBT_AVX2
const Table<float> *avx2_table();  // avx2.cpp; null if the processor has no AVX2
#endif

}  // namespace kbt
