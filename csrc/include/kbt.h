/* kbt.h - a Bayesian MLP head that learns sample by sample in fixed memory. C99. See also kbt_policy.h
 * (trunk and physical units), kbt_mailbox.h (threads), kbt_flight.h (flight recorder) and kbt_store.h (flash memory).
 *
 * The head replaces the readout of a frozen network. `kbt_predict` gives a mean with its covariance, `kbt_update` (or
 * `kbt_observe`, right after a prediction) learns one sample in closed form. The caller owns all memory: ask
 * `kbt_arena_bytes` how much a configuration needs, hand it to `kbt_init`, and nothing is allocated afterwards.
 *
 * Conventions
 *  - Every `void *` array holds elements of the configured dtype (float or double), C-contiguous, naturally aligned.
 *  - d = widths[0] inputs, d_o = widths[layers] outputs. "rows" is how many inputs one call carries, 1..max_rows.
 *  - Inputs h below 1e-12 (double: 1e-100) count as zero: their squares would be denormal, and slow.
 *  - A call that returns anything but KBT_OK leaves the learned state unchanged; only counters may change. A rejected
 *    call (KBT_E_...) does not affect later results either: a prediction waiting for kbt_observe is kept. Restoring it
 *    can make a rejected call one forward pass slower than an accepted one.
 *  - No function allocates, throws, prints, keeps a global or loops without a bound fixed by the configuration.
 *  - One head belongs to one thread at a time. Different heads are independent.
 */
#ifndef KBT_H
#define KBT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(KBT_BUILD_LIBRARY) && defined(__GNUC__)
#define KBT_API __attribute__((visibility("default")))
#else
#define KBT_API
#endif

#define KBT_ABI_VERSION 2
#define KBT_MAX_LAYERS 8
#define KBT_ARENA_ALIGN 64 /* bytes: the alignment of the memory given to kbt_init */

typedef enum kbt_status {
  KBT_OK = 0,
  KBT_GATED = 1,       /* the innovation gate rejected the sample: nothing was learned */
  KBT_E_NULL = 2,      /* a required pointer is NULL */
  KBT_E_CONFIG = 3,    /* a setting is out of range, or two settings contradict each other */
  KBT_E_SIZE = 4,      /* the configuration does not fit into the address space, or the arena is too small */
  KBT_E_ALIGN = 5,     /* the arena is not aligned to KBT_ARENA_ALIGN */
  KBT_E_ROWS = 6,      /* rows outside 1..max_rows */
  KBT_E_NONFINITE = 7, /* an input holds NaN or Inf */
  KBT_E_RANGE = 8,     /* input so large, or rows so unlike, that the result would overflow or be mere rounding error */
  KBT_E_NOISE = 9,     /* noise: wrong count, negative, not symmetric, or not allowed with this configuration */
  KBT_E_LABEL = 10,    /* a label outside 0..d_o-1, a target row that is not a distribution, or labels for a gaussian */
  KBT_E_ORDER = 11,    /* observe without a prediction before it */
  KBT_E_LAYER = 12,    /* layer index outside 0..layers-1 */
  KBT_E_BLOB_SHORT = 13,   /* state blob: shorter than its header, or than the length in it */
  KBT_E_BLOB_FOREIGN = 14, /* state blob: not a state blob at all */
  KBT_E_BLOB_VERSION = 15, /* state blob: written by a newer format */
  KBT_E_BLOB_CRC = 16,     /* state blob: damaged */
  KBT_E_BLOB_CONFIG = 17,  /* state blob: of another configuration */
  KBT_E_BLOB_VALUE = 18,   /* state blob: intact, but holds a non-finite mean or covariance or a negative variance */
  KBT_E_TRUNK_INPUT = 19,  /* kbt_policy.h: the network rejected an input, such as NaN or an id out of range */
  KBT_E_TRUNK_OUTPUT = 20, /* kbt_policy.h: the network's output is not finite */
  KBT_E_OWNER = 21         /* kbt_policy.h: the latest prediction was not made by this policy */
} kbt_status;

enum { KBT_FLOAT32 = 0, KBT_FLOAT64 = 1 };                                                         /* dtype */
enum { KBT_GAUSSIAN = 0, KBT_SOFTMAX = 1 };                                                        /* output */
enum { KBT_FULL = 0, KBT_NEURON = 1, KBT_DIAGONAL = 2, KBT_SHARED = 3, KBT_COVARIANCE_AUTO = -1 }; /* covariance */
enum { KBT_FUSE = 0, KBT_REPLACE = 1 };                                                            /* rule */
enum {
  KBT_NOISE_CONSTANT = 0,     /* one number, or one per output */
  KBT_NOISE_ADAPTIVE = 1,     /* learned, one per output; gaussian only */
  KBT_NOISE_MULTINOMIAL = 2,  /* softmax only */
  KBT_NOISE_FULL = 3,         /* a matrix is learned: gaussian, one layer, drift KBT_DRIFT_AUTO */
  KBT_NOISE_MATRIX = 4        /* constant; may be a matrix over the outputs */
};                            /* noise */
#define KBT_DRIFT_AUTO (-1.0) /* drift: several filters, weighed by what each of them predicted */

/* Fill with kbt_config_default, then set what differs. */
typedef struct kbt_config {
  int32_t dtype;                      /* KBT_FLOAT32 */
  int32_t layers;                     /* L, 1..KBT_MAX_LAYERS */
  int32_t widths[KBT_MAX_LAYERS + 1]; /* d, n_1 .. n_{L-1}, d_o */
  int32_t max_rows;                   /* largest number of rows in one joint update */
  int32_t output;                     /* KBT_GAUSSIAN */
  int32_t covariance;                 /* KBT_COVARIANCE_AUTO: SHARED where it is exact, which is one gaussian layer with
                                         equal or learned noise, rule KBT_FUSE and certain inputs; else NEURON. SHARED:
                                         one layer, one factor for all outputs */
  int32_t rule;                       /* KBT_FUSE; KBT_REPLACE is the paper's, rejected for softmax */
  int32_t noise;                      /* KBT_NOISE_CONSTANT */
  int32_t relu_order;                 /* 2..12: where the off-diagonal series of the ReLU stops */
  int32_t softmax_order;              /* 0: moment softmax, method.md (11.1); 1, 2: Taylor order of the mean */
  double prior_var[KBT_MAX_LAYERS];   /* variance of every weight of a layer before any data; a ratio to the noise where
                                         that is learned or drift is KBT_DRIFT_AUTO; 0: automatic */
  double noise_var;                   /* >= 0, initial observation noise R; see kbt_set_noise for more than a scalar */
  double input_var;                   /* >= 0, variance of the input h */
  double forgetting;                  /* (0, 1]; 1 forgets nothing */
  double gate;                        /* reject samples with NIS above it; 0 switches the gate off */
  double drift;                       /* KBT_DRIFT_AUTO; 0: one filter of a plant that stands still; q > 0: one random
                                         walk, whose outputs move by q times the noise variance per sample */
} kbt_config;

enum { KBT_NO_CHANGE = 0, KBT_CHANGED = 1, KBT_RETURNED = 2 }; /* kbt_result.changed, kbt_change.kind */

/* The sample judged before it is learned. */
typedef struct kbt_result {
  double nis;            /* normalised innovation squared; its mean is rows * d_o for a consistent gaussian head */
  double log_likelihood; /* log predictive density (gaussian) or probability (softmax) of the sample, all rows */
  int32_t changed;       /* KBT_NO_CHANGE, or what the head has just noticed: KBT_CHANGED, KBT_RETURNED */
  int32_t spare;
} kbt_result;

/* Events since kbt_init. Diagnostics, not part of the saved state. */
typedef struct kbt_counters {
  uint64_t rejected; /* calls rejected for their input */
  uint64_t gated;    /* samples rejected by the gate */
  uint64_t floored;  /* factors held at a floor, and steps skipped, because only rounding error was left */
} kbt_counters;

/* Are the errors as large as the predicted variances? docs/health.md explains the rules. */
typedef enum kbt_verdict {
  KBT_TOO_FEW = 0,        /* fewer than 30 samples since the prior, the noise or the state was set */
  KBT_CONSISTENT = 1,     /* the average is inside the band */
  KBT_OVERCONFIDENT = 2,  /* errors larger than predicted, or a gate that rejects more than outliers */
  KBT_UNDERCONFIDENT = 3, /* errors smaller than predicted */
  KBT_DIVERGING = 4,      /* errors far beyond the band and growing, most samples rejected, or variances blown up */
  KBT_NO_BAND = 5,        /* rule KBT_REPLACE: the expected average is unknown */
  KBT_JUST_CHANGED = 6,   /* members: the plant changed within the last 200 samples */
  KBT_DRIFTING = 7,       /* members: a random walk explains the samples better than a plant that stands still */
  KBT_NOISIER = 8         /* members: the noise variance is more than four times its usual level */
} kbt_verdict;

typedef struct kbt_health {
  kbt_counters counters;
  uint64_t seen;  /* samples in the average, since the prior, the noise or the state was set */
  double average; /* gaussian: NIS / (rows * d_o), expected 1; softmax: surprise less entropy, nats a row, expected 0 */
  double low, high;                 /* 99.9 % band of the average of a consistent head */
  double gated;                     /* recent share of samples that the gate rejected */
  double smallest_var, largest_var; /* entries of D over all layers */
  kbt_verdict verdict;
} kbt_health;

/* What the filters of a head with drift KBT_DRIFT_AUTO think of the plant. With hidden layers, a softmax,
 * covariance KBT_DIAGONAL or an input_var there are four: two stand still, one drifts, one has changed. */
#define KBT_MEMBERS 8
enum {
  KBT_STILL = 0,         /* it stands still; of a head with four filters, both that do */
  KBT_NOISY = 1,         /* it stands still, and the targets are noisy */
  KBT_DRIFTS_SLOWLY = 2, /* random walks of all weights, three rates */
  KBT_DRIFTS = 3,
  KBT_DRIFTS_FAST = 4,
  KBT_OFFSET_DRIFTS = 5, /* a random walk of the bias alone */
  KBT_HAS_CHANGED = 6,   /* begun anew: it has just changed */
  KBT_AS_BEFORE = 7      /* it is as it was before the latest change */
};
typedef struct kbt_belief {
  double weight[KBT_MEMBERS]; /* sum 1; of a head without members the first is 1 */
  uint64_t changes;           /* noticed since the prior or the state was set */
} kbt_belief;

typedef struct kbt_change {
  uint64_t sample;  /* where the plant changed, as the head sees it: a count of samples */
  uint64_t noticed; /* when the head was sure */
  double evidence;  /* nats */
  int32_t kind;     /* KBT_CHANGED, KBT_RETURNED */
  int32_t spare;
} kbt_change;
#define KBT_MOST_CHANGES 16 /* that a head remembers */

typedef struct kbt_head kbt_head;

KBT_API uint32_t kbt_abi_version(void);
KBT_API const char *kbt_status_str(kbt_status status);

/* A 1-layer float32 gaussian head with `d` inputs and `d_o` outputs: members, learned noise, nothing to choose. */
KBT_API void kbt_config_default(kbt_config *cfg, int32_t d, int32_t d_o);
/* The same as one filter of a plant that stands still: constant noise 1e-2, prior_var 1, softmax of first order. */
KBT_API void kbt_config_single(kbt_config *cfg, int32_t d, int32_t d_o);
/* Why a configuration is rejected: KBT_OK, KBT_E_CONFIG or KBT_E_SIZE; *field (if not NULL) names the setting. */
KBT_API kbt_status kbt_config_check(const kbt_config *cfg, const char **field);
/* Bytes of arena that kbt_init needs; 0 when the configuration is rejected. */
KBT_API size_t kbt_arena_bytes(const kbt_config *cfg);
/* The part of the arena that depends on the machine, because it holds pointers. For code generators. */
KBT_API size_t kbt_record_bytes(int32_t dtype);

/* Lay a head out in `arena`. Its weights are zero until kbt_set_prior, kbt_set_means or kbt_state_load. The head lives
 * as long as the arena; there is nothing to free, and the arena must not be moved. */
KBT_API kbt_status kbt_init(const kbt_config *cfg, void *arena, size_t arena_bytes, kbt_head **head);

/* Prior that reproduces a readout exactly: weight d_o x d, bias d_o (or NULL). Hidden widths must be >= 2d; `seed`
 * draws the input weights of the spare neurons. Variances return to prior_var and the sample count to 0. */
KBT_API kbt_status kbt_set_prior(kbt_head *head, const void *weight, const void *bias, uint64_t seed);
/* Prior from explicit means: one array n_i x (m_i + 1) per layer, bias in the last column. */
KBT_API kbt_status kbt_set_means(kbt_head *head, const void *const *means);
/* Observation noise R: count = 1 (scalar), d_o (variances) or, with KBT_NOISE_MATRIX, d_o * d_o (symmetric matrix,
 * row-major). KBT_SHARED with constant noise takes equal variances. A prediction that waits for kbt_observe goes with
 * it, unless it would overflow. */
KBT_API kbt_status kbt_set_noise(kbt_head *head, const void *noise, int32_t count);

/* h: rows x d. mean: rows x d_o. cov: (rows * d_o)^2 epistemic, or NULL. total_var: rows x d_o, the diagonal of cov
 * plus the noise of an observation, or NULL. */
KBT_API kbt_status kbt_predict(kbt_head *head, const void *h, int32_t rows, void *mean, void *cov, void *total_var);
/* More of the latest prediction, which must still wait to be observed (else KBT_E_ORDER). var: rows x d_o, the diagonal
 * of cov. cov as above. Either may be NULL. */
KBT_API kbt_status kbt_predicted(kbt_head *head, void *var, void *cov);

/* Learn targets y (rows x d_o; one-hot or probabilities for softmax) at h (rows x d). `noise` overrides R for this call
 * (count as in kbt_set_noise; NULL, 0 to use the head's own). `result` may be NULL. */
KBT_API kbt_status kbt_update(kbt_head *head, const void *h, int32_t rows, const void *y, const void *noise,
                              int32_t noise_count, kbt_result *result);
/* The same for the rows of the latest kbt_predict that was not rejected, without a second forward pass. Each prediction
 * can be observed once. */
KBT_API kbt_status kbt_observe(kbt_head *head, const void *y, const void *noise, int32_t noise_count,
                               kbt_result *result);
/* The same for class labels: one int32 per row. */
KBT_API kbt_status kbt_update_labels(kbt_head *head, const void *h, int32_t rows, const int32_t *labels,
                                     const void *noise, int32_t noise_count, kbt_result *result);
KBT_API kbt_status kbt_observe_labels(kbt_head *head, const int32_t *labels, const void *noise, int32_t noise_count,
                                      kbt_result *result);

KBT_API kbt_status kbt_get_config(const kbt_head *head, kbt_config *cfg);
KBT_API kbt_status kbt_get_counters(const kbt_head *head, kbt_counters *counters);
/* One pass over the variances: cheap enough to call once a second. */
KBT_API kbt_status kbt_get_health(const kbt_head *head, kbt_health *health);
KBT_API kbt_status kbt_get_belief(const kbt_head *head, kbt_belief *belief);
/* The latest changes, oldest first, at most `room` of them; *count tells how many. */
KBT_API kbt_status kbt_get_changes(const kbt_head *head, kbt_change *changes, int32_t room, int32_t *count);
/* The plant is known to have changed (a tool was swapped): the head begins anew from its prior, and keeps what it had
 * learned in case the plant goes back, which heads of one linear layer notice. Nothing happens before the first sample.
 * KBT_E_CONFIG for a head whose drift is not KBT_DRIFT_AUTO: it is one filter, which has not kept its prior. */
KBT_API kbt_status kbt_suppose_changed(kbt_head *head);
/* Back to the prior, as after kbt_set_prior or kbt_set_means. KBT_E_CONFIG for a head whose drift is not
 * KBT_DRIFT_AUTO: it has not kept its prior, which kbt_set_prior or kbt_set_means gives again. */
KBT_API kbt_status kbt_reset(kbt_head *head);
KBT_API uint64_t kbt_samples(const kbt_head *head);       /* updates learned since the prior was set */
KBT_API int32_t kbt_predicted_rows(const kbt_head *head); /* rows that kbt_observe would learn; 0 = none */
/* noise: d_o (variances) or, when a matrix was set or is learned, d_o * d_o, for which there must be room with
 * KBT_NOISE_MATRIX and KBT_NOISE_FULL; *count tells which. */
KBT_API kbt_status kbt_get_noise(const kbt_head *head, void *noise, int32_t *count);
/* mean: n x (m + 1), bias last. */
KBT_API kbt_status kbt_get_mean(const kbt_head *head, int32_t layer, void *mean);
/* cov of the weights. full: (n (m+1))^2; neuron, shared: n x (m+1)^2; diagonal: n x (m+1). */
KBT_API kbt_status kbt_get_cov(const kbt_head *head, int32_t layer, void *cov);

/* The learned state as little-endian bytes, the same on every machine: header, configuration, means, factors, noise,
 * CRC-32. */
KBT_API size_t kbt_state_size(const kbt_head *head);
KBT_API kbt_status kbt_state_save(const kbt_head *head, void *blob, size_t size);
/* The same bytes in order and in small pieces, for writing to flash without RAM for a copy. */
typedef void kbt_sink(void *context, const void *bytes, size_t count);
KBT_API kbt_status kbt_state_stream(const kbt_head *head, kbt_sink *sink, void *context);
/* Everything is checked before the first byte of the head changes. */
KBT_API kbt_status kbt_state_load(kbt_head *head, const void *blob, size_t size);
/* The configuration in a blob, to make a head for it. Checks header and CRC. */
KBT_API kbt_status kbt_state_config(const void *blob, size_t size, kbt_config *cfg);

#ifdef __cplusplus
}
#endif

#endif /* KBT_H */
