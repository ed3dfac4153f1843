/* @name@.c - physical units around the network and the head.
 * @made@
 */
#include "@name@.h"

#include <string.h>

int @name@_trunk_run(const void *const *inputs, float *output);
extern const unsigned char @name@_state[@state_bytes@];
extern unsigned char @name@_arena[];
extern const size_t @name@_arena_bytes;

/* The network gets (x - mean) / scale; its head's output u means y = offset + scale * u. */
@input_constants@
@output_constants@

static kbt_head *head;

/* Results in physical units are doubles, as the square of a scale need not fit into a float. The head writes its own
 * numbers to the start of the same memory. They are converted from the last to the first, so that none is overwritten
 * before it is read. */
static double head_value(const double *from, size_t i) {
  @real@ value;
  memcpy(&value, (const char *)from + i * sizeof value, sizeof value);
  return (double)value;
}

kbt_status @name@_init(void) {
  kbt_config cfg;
  kbt_status status = kbt_state_config(@name@_state, sizeof @name@_state, &cfg);
  head = NULL;
  if (status != KBT_OK) return status;
  if (kbt_arena_bytes(&cfg) != @name@_arena_bytes) return KBT_E_SIZE;
  status = kbt_init(&cfg, @name@_arena, @name@_arena_bytes, &head);
  if (status != KBT_OK) return status;
  return kbt_state_load(head, @name@_state, sizeof @name@_state);
}

kbt_status @name@_predict(@inputs@, double mean[@count@], double cov[@count_squared@], double total_var[@count@]) {
  if (@null_inputs@ || mean == NULL) return KBT_E_NULL;
@scale_inputs@
  float h[@h_count@];
  const int refused = @name@_trunk_run(inputs, h);
  if (refused != 0) return refused == 1 ? @refused_input@ : KBT_E_RANGE;@widen_h@
  @real@ u[@count@];
  const kbt_status status = kbt_predict(head, @h_name@, @rows@, u, cov, total_var);
  if (status != KBT_OK) return status;
@to_physical@
  return KBT_OK;
}

kbt_status @name@_observe(const double y[@count@], kbt_result *result) {
  if (y == NULL) return KBT_E_NULL;
@to_head@
  const kbt_status status = kbt_observe(head, target, NULL, 0, result);
  if (status != KBT_OK && status != KBT_GATED) return status;@physical_result@
  return status;
}
@labels@
kbt_store_status @name@_save(const kbt_store *store) {
  return kbt_store_save(store, head);
}

kbt_store_status @name@_load(const kbt_store *store) {
  return kbt_store_load(store, head);
}

kbt_head *@name@_head(void) {
  return head;
}
