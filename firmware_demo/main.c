/* main.c - a policy that falls learns to balance, on the device, in spite of a power cut.
 *
 * The policy is a transformer trained for a cart with a short, light pole. This cart has a pole ten times as long and
 * as heavy. Start 1: the policy drops it; it learns 25 samples and saves; it learns on, and the power fails in the
 * middle of the next save. Start 2: it finds the 25 samples, learns to 50, and balances. Then the instructions are
 * counted.
 */
#include <math.h>
#include <stdio.h>

#include "board.h"
#include "cartpole.h"
#include "flash.h"
#include "plant.h"

enum { kSaved = 25, kCut = 40, kLearned = 50, kTrials = 5, kInputs = 1000 };

/* Kept over a reset. What is there when the power is first switched on is anything but this number. */
static struct { uint32_t magic, starts; } life __attribute__((section(".noinit")));

/* ---- samples: number k is always the same ------------------------------------------------------------------------ */

static float draw(uint32_t *state, float limit) { /* uniform in +-limit */
  *state = *state * 1664525U + 1013904223U;
  return limit * ((float)(int32_t)*state * (1.0F / 2147483648.0F));
}

static PlantState drawn(uint32_t k, float x, float v, float theta, float omega) {
  uint32_t state = k * 2654435769U + 1U;
  PlantState s;
  s.x = draw(&state, x);
  s.v = draw(&state, v);
  s.theta = draw(&state, theta);
  s.omega = draw(&state, omega);
  return s;
}

static PlantState sample(uint32_t k) {
  return drawn(k, 16.0F, 12.0F, 0.6F, 1.0F);
}
static PlantState start_of(uint32_t trial) {
  return drawn(1000000U + trial, 2.5F, 2.5F, 0.5F, 0.5F);
}

static kbt_status predict(PlantState s, double *force, double *total_var) {
  const double x[4] = {s.x, s.v, s.theta, s.omega};
  return cartpole_predict(x, force, NULL, total_var);
}

static int must(int status, const char *what) {
  if (status != 0) printf("%s: status %d\n", what, status);
  return status == 0;
}

/* ---- the job ------------------------------------------------------------------------------------------------------
 */

static int learn_until(uint64_t samples) {
  while (kbt_samples(cartpole_head()) < samples) {
    const PlantState s = sample((uint32_t)kbt_samples(cartpole_head()));
    const double target = (double)plant_expert(s);
    double force;
    if (!must(predict(s, &force, NULL), "predict") || !must(cartpole_observe(&target, NULL), "observe")) return 0;
  }
  return 1;
}

static void add_to_hash(void *hash, const void *bytes, size_t count) { /* FNV-1a */
  const unsigned char *from = bytes;
  while (count-- > 0) *(uint32_t *)hash = (*(uint32_t *)hash ^ *from++) * 16777619U;
}

static uint32_t state_hash(void) {
  uint32_t hash = 2166136261U;
  kbt_state_stream(cartpole_head(), add_to_hash, &hash);
  return hash;
}

static void print_row(int period, PlantState s, double force, double total_var) {
  printf("  %5.1f  %7.2f  %7.2f  %7.3f  %7.3f  %9.2f  %8.2f\n", (double)period / PLANT_RATE, (double)s.x, (double)s.v,
         (double)s.theta, (double)s.omega, force, (double)sqrtf((float)total_var));
}

/* Closes the loop from one start. Returns the seconds until the fall, or 0 if it ended balanced, -1 if neither. */
static float trial(uint32_t number, int show) {
  const int periods = PLANT_RATE * PLANT_SECONDS, held = PLANT_RATE * 5;
  PlantState s = start_of(number);
  int period, balanced = 1;
  if (show) printf("\n  t (s)    x (m)  v (m/s)    theta    omega  force (N)   std (N)\n");
  for (period = 0; period < periods; ++period) {
    double force = 0.0, total_var = 0.0;
    float push;
    if (!must(predict(s, &force, &total_var), "predict")) return -1.0F;
    if (show &&
        (period % PLANT_RATE == 0 ? period <= 5 * PLANT_RATE || period % (5 * PLANT_RATE) == 0 : period == 25)) {
      print_row(period, s, force, total_var);
    }
    push = (float)force;
    if (push > 100.0F) push = 100.0F;
    if (push < -100.0F) push = -100.0F;
    s = plant_step(s, push);
    if (plant_fallen(s)) return (float)(period + 1) / PLANT_RATE;
    if (period >= periods - held && !plant_balanced(s)) balanced = 0;
  }
  return balanced ? 0.0F : -1.0F;
}

static int count_balanced(void) {
  int number, balanced = 0;
  for (number = 0; number < kTrials; ++number) {
    const float fell = trial((uint32_t)number, 0);
    if (fell > 0.0F) {
      printf("  trial %d: fell after %.1f s\n", number + 1, (double)fell);
    } else {
      printf("  trial %d: %s\n", number + 1, fell == 0.0F ? "balanced" : "did not settle");
    }
    balanced += fell == 0.0F;
  }
  return balanced;
}

/* ---- instructions -------------------------------------------------------------------------------------------------
 */

typedef struct Range {
  uint32_t least, most;
} Range;

static void add(Range *range, uint32_t from, uint32_t to) {
  const uint32_t count = board_instructions(from, to);
  if (range->most == 0 || count < range->least) range->least = count;
  if (count > range->most) range->most = count;
}

static void print_range(const char *what, Range r) {
  printf("  %s %lu to %lu, ratio %.4f\n", what, (unsigned long)r.least, (unsigned long)r.most,
         r.least == 0 ? 0.0 : (double)r.most / (double)r.least);
}

/* A row of features, and what a plant makes of them. The plant changes half-way, and some rows are small. */
static float drawn_row(uint32_t k, float *h) {
  uint32_t state = k * 2654435769U + 7U;
  const float sign = k < kInputs / 2 ? 1.0F : -1.0F;
  float y = draw(&state, 0.1F);
  int i;
  for (i = 0; i < 16; ++i) {
    h[i] = draw(&state, k % 8 == 7 ? 0.01F : 3.0F);
    y += sign * (i % 2 == 0 ? 1.0F : -0.5F) * h[i];
  }
  return y;
}

/* Over states as they are sampled; then of the head alone, which notices a change and is surprised by outliers. */
static int count_instructions(void) {
  Range policy_predict = {0, 0}, policy_observe = {0, 0}, head_predict = {0, 0}, head_observe = {0, 0};
  kbt_belief belief;
  uint32_t k;
  board_counter_start();
  for (k = 0; k < kInputs; ++k) {
    const PlantState s = sample(1000U + k);
    const double x[4] = {s.x, s.v, s.theta, s.omega}, target = (double)plant_expert(s);
    uint32_t before, between, after;
    double force, cov, total_var;
    int status;
    before = board_ticks();
    status = cartpole_predict(x, &force, &cov, &total_var);
    between = board_ticks();
    status |= cartpole_observe(&target, NULL);
    after = board_ticks();
    if (!must(status, "counting")) return 0;
    add(&policy_predict, before, between);
    add(&policy_observe, between, after);
  }
  for (k = 0; k < kInputs; ++k) {
    float h[16], u, cov, total_var;
    const float y = drawn_row(k, h) + (k % 50 == 49 ? 100.0F : 0.0F);
    uint32_t before, between, after;
    int status;
    before = board_ticks();
    status = kbt_predict(cartpole_head(), h, 1, &u, &cov, &total_var);
    between = board_ticks();
    status |= kbt_observe(cartpole_head(), &y, NULL, 0, NULL);
    after = board_ticks();
    if (!must(status, "counting")) return 0;
    add(&head_predict, before, between);
    add(&head_observe, between, after);
  }
  kbt_get_belief(cartpole_head(), &belief);
  printf("\ninstructions over %d inputs; changes noticed: %lu\n", (int)kInputs, (unsigned long)belief.changes);
  print_range("predict, network and head:", policy_predict);
  print_range("observe:", policy_observe);
  print_range("predict, head alone:", head_predict);
  print_range("observe, head alone:", head_observe);
  return 1;
}

/* ---- two starts ---------------------------------------------------------------------------------------------------
 */

static int first_start(void) {
  printf("start 1: a new device, a pole ten times as long and as heavy as the policy knows\n");
  flash_start();
  if (cartpole_load(&flash_store) != KBT_STORE_EMPTY) return 1;
  if (count_balanced() != 0) return 1;
  if (!learn_until(kSaved) || !must(cartpole_save(&flash_store), "save")) return 1;
  printf("  learned %d samples, saved\n", (int)kSaved);
  if (!learn_until(kCut)) return 1;
  printf("  learned %d samples, and while they are saved the power fails\n", (int)kCut);
  flash_fail_after(32 * 1024 + CARTPOLE_STATE_BYTES / 2); /* the slot is erased, the state is half written */
  cartpole_save(&flash_store);
  return 1; /* not reached */
}

static int second_start(void) {
  if (!must(cartpole_load(&flash_store), "load")) return 1;
  printf("start 2: found %lu samples\n", (unsigned long)kbt_samples(cartpole_head()));
  if (kbt_samples(cartpole_head()) != kSaved) return 1;
  if (!learn_until(kLearned) || !must(cartpole_save(&flash_store), "save")) return 1;
  printf("  learned %d samples, saved: state %08lx\n", (int)kLearned, (unsigned long)state_hash());
  if (count_balanced() != kTrials || trial(0, 1) != 0.0F) return 1;
  if (!count_instructions()) return 1;
  printf("\nstack: %lu bytes at most\n", (unsigned long)board_stack_used());
  printf("the policy balances\n");
  return 0;
}

int main(void) {
  const uint32_t kMagic = 0x6B627465U;
  if (life.magic != kMagic) life.starts = 0;
  life.magic = kMagic;
  ++life.starts;
  if (!must(cartpole_init(), "init")) return 1;
  return life.starts == 1 ? first_start() : second_start();
}
