/* C interface of the CPU expert engine. No torch, no Python: one library serves every interpreter.
 *
 * An engine owns a fixed set of worker threads. Jobs run one after another, in the order they were
 * submitted; all workers share the work of a job and sleep when there is none. Every function may be
 * called from any thread. No function throws: a status other than 0 is an error, whose sentence
 * gr_last_error returns to the thread that received the status.
 */
#ifndef GREENROOM_CPU_H
#define GREENROOM_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GR_ABI_VERSION 13

typedef enum { GR_BF16 = 0, GR_F16 = 1, GR_F32 = 2 } gr_dtype;

typedef enum { GR_SILU = 0, GR_GELU = 1, GR_GELU_TANH = 2, GR_RELU2 = 3, GR_SWIGLU_OAI = 4 } gr_activation;

/* In rising order of preference. GR_ISA_AUTO takes the best one that this processor runs. */
typedef enum {
  GR_ISA_AUTO = -1,
  GR_ISA_PORTABLE = 0,
  GR_ISA_AVX2 = 1,
  GR_ISA_AVX512_BF16 = 2,
  GR_ISA_AMX_BF16 = 3
} gr_isa;

/* One expert's block: up [up_rows, hidden] (gate rows first), down [hidden, inter], biases.
 * Offsets are in bytes from the block's start; blocks start on 64-byte boundaries. */
typedef struct {
  int32_t hidden;
  int32_t inter;
  int32_t dtype;      /* gr_dtype of weights, biases and hidden states */
  int32_t gated;      /* 1: up_rows = 2 * inter; 0: up_rows = inter */
  int32_t has_bias;
  int32_t activation; /* gr_activation */
  float alpha;
  float limit;        /* INFINITY: no clamp */
  int64_t up, down, up_bias, down_bias;
} gr_format;

/* out[t] = sum over k of weights[t, k] * expert(ids[t, k])(hidden[t]), in the order of expert ids, so
 * that the result depends on neither the number of threads nor where an expert's block lies.
 * Pairs whose id is negative or >= num_experts are skipped; a token without pairs gets zeros.
 * One expert may be divided along its inner width, with somebody else computing its first rows: `divided` is its id and
 * the first row of `inter` that is computed here, a multiple of 32 within (0, inter). Of its block only these rows of
 * `up` and these columns of `down` are read; the bias of `down` is added here, in full. A null `divided` and a negative
 * id divide nothing, and so does an expert that nobody chose.
 * With `done`, the end of the job, good or bad, is also told there: `done_value` is stored with release behind out and
 * busy_ns, for a device that waits for it. Everything pointed to must stay alive and unchanged until gr_wait has seen
 * its end. */
typedef struct {
  const gr_format *format;
  const void *const *experts; /* [num_experts] block addresses; those not chosen may be null */
  int32_t num_experts;
  int32_t top_k;
  int64_t tokens;             /* may be 0 */
  const void *hidden;         /* [tokens, hidden] of format->dtype, rows contiguous */
  const int32_t *ids;         /* [tokens, top_k] */
  const float *weights;       /* [tokens, top_k] */
  float *out;                 /* [tokens, hidden], overwritten */
  const int32_t *divided;     /* {expert, first row} or null */
  uint32_t *done;             /* or null */
  uint32_t done_value;
  int64_t *busy_ns;           /* or null; written once: nanoseconds from the job's turn to its end */
} gr_job;

/* y[t, r] = bias[r] + sum over k of weight[r, k] * x[t, k], added up in fp32 and rounded once. A row of x gives the
 * same bits whichever other rows are there and however many threads. Made for a few rows: every weight is read from
 * memory once for up to 32 of them. Everything pointed to must stay alive and unchanged until gr_wait has seen its
 * end. */
typedef struct {
  const void *weight; /* [rows, width] of dtype, contiguous, as are all others */
  const void *bias;   /* [rows], or null */
  const void *x;      /* [tokens, width] */
  void *y;            /* [tokens, rows], overwritten */
  int64_t tokens;     /* may be 0 */
  int64_t rows;
  int64_t width;
  int32_t dtype;      /* gr_dtype */
} gr_linear;

/* out[h] = softmax(scale * q[h] . k) v of one new token over all positions of a KV cache; sums in fp32. A query head
 * belongs to key head h / (heads / key_heads). Distances are in elements. Everything pointed to must stay alive and
 * unchanged until gr_wait has seen its end. */
typedef struct {
  const void *q;        /* [heads, width] of dtype, contiguous */
  const void *k;        /* [key_heads, length, width], a position's row contiguous */
  const void *v;        /* [key_heads, length, value_width], the same */
  void *out;            /* [heads, value_width], overwritten */
  int64_t length;       /* at least 1 */
  int64_t k_head, k_position, v_head, v_position;
  int32_t heads;        /* at most 32 a key head */
  int32_t key_heads;
  int32_t width;
  int32_t value_width;  /* a multiple of 16, at most 512 */
  int32_t dtype;        /* GR_BF16 or GR_F32 */
  float scale;
} gr_attention;

/* What lies between the products of one token, in BF16 or fp32; all but `out` of a store contiguous. Nothing is checked
 * but kind and dtype.
 * NORM: x [rows, width], y [width]: the weight; epsilon. TURN: rotary embedding of heads x [rows, width], y, z [width]:
 * cosines, sines. CHOOSE: x [width]: a router's logits (at most 1024), the `rows` likeliest experts (at most 32), ids:
 * int32 [rows], out: float [rows], rounded to weights_dtype. STORE: x [rows, width] to out, whose rows are `pitch`
 * elements apart. ADD: x + y [rows, width]. */
typedef enum { GR_ROW_NORM = 0, GR_ROW_TURN = 1, GR_ROW_CHOOSE = 2, GR_ROW_STORE = 3, GR_ROW_ADD = 4 } gr_row_kind;

typedef struct {
  int32_t kind;          /* gr_row_kind */
  int32_t dtype;         /* GR_BF16 or GR_F32, of x, and of all others but where it says otherwise */
  const void *x;
  const void *y;
  const void *z;
  void *out;
  int32_t *ids;
  int64_t rows;
  int64_t pitch;
  int32_t width;
  int32_t weights_dtype;
  int32_t normalise;
  float epsilon;
} gr_row;

/* One step of a sequence: `count` products that do not depend on each other, or `count` rows one after another, or one
 * attention. */
typedef enum { GR_STEP_LINEAR = 0, GR_STEP_ROWS = 1, GR_STEP_ATTENTION = 2 } gr_step_kind;

typedef struct {
  int32_t kind;     /* gr_step_kind */
  int32_t count;    /* at least 1 */
  const void *what; /* [count] gr_linear, gr_row or gr_attention */
} gr_step;

typedef struct gr_engine gr_engine;

/* A job that a device posts by itself. The device writes hidden, ids, weights and divided, then stores the number of rows
 * (1 to job.tokens) into *request with release. The engine clears *request before it starts the job (a request
 * cleared after done was raised would be the next one, lost), computes these rows into out, and stores 1 into *done
 * with release, also if the job failed. The device clears *done before its next request.
 * Give every word a cache line of its own. */
typedef struct {
  gr_job job;        /* tokens: rows at most */
  uint32_t *request;
  uint32_t *done;
  int64_t *busy_ns;  /* the last job's time from its turn, or from seeing the request if that is later, to raising done */
} gr_mailbox;

/* Mailboxes that are armed together. */
typedef struct gr_mailboxes gr_mailboxes;

/* Bits 1 << gr_isa of what this processor (and its operating system) runs. */
uint32_t gr_isa_supported(void);

int32_t gr_abi_version(void);

/* threads >= 1; cores: one core number a thread, or null to leave the threads unpinned. batch_invariant: 1 if a token's
 * result must not depend, by a single bit, on which other tokens are in the job. callers_help: 1 if whoever is in gr_wait
 * works as one of the threads, the one of the first core; with one thread nobody does. */
int32_t gr_engine_create(int32_t threads, const int32_t *cores, int32_t isa, int32_t batch_invariant,
                         int32_t callers_help, gr_engine **engine);

/* What a model does with tokens between its products, computed by the calling thread; see kernel.h. isa: as
 * gr_engine_isa returns it. dtype: GR_BF16 or GR_F32. Nothing is checked. */
void gr_norm(int32_t isa, int32_t dtype, const void *x, const void *weight, void *y, int64_t rows, int32_t width,
             float epsilon);
void gr_turn(int32_t isa, int32_t dtype, const void *x, const void *cosines, const void *sines, void *y, int64_t heads,
             int64_t tokens, int32_t width);
/* At most 1024 experts and 32 choices. */
void gr_choose(int32_t isa, int32_t dtype, const void *logits, int64_t tokens, int32_t experts, int32_t top_k,
               int32_t normalise, float *weights, int64_t *ids);

/* Disarms all mailboxes, waits for jobs, then ends the threads. Its mailboxes may be destroyed later. */
void gr_engine_destroy(gr_engine *engine);

/* The gr_isa in use. */
int32_t gr_engine_isa(const gr_engine *engine);

/* Copies *job and queues it; *ticket is for gr_wait. */
int32_t gr_submit(gr_engine *engine, const gr_job *job, uint64_t *ticket);

/* The same for *linear. */
int32_t gr_linear_submit(gr_engine *engine, const gr_linear *linear, uint64_t *ticket);

/* The same for *attention. */
int32_t gr_attention_submit(gr_engine *engine, const gr_attention *attention, uint64_t *ticket);

/* Copies and queues steps that run one behind another, each with all threads, as one job: each may read what those before
 * it have written. Behind one that fails no other runs. */
int32_t gr_sequence_submit(gr_engine *engine, const gr_step *steps, int32_t count, uint64_t *ticket);

/* Blocks until the job is done and returns its status. Each ticket is waited for until that, exactly once. *late: 1,
 * and the status 0, if for limit_ms none of the engine's work has ended; the job may be waited for again. */
int32_t gr_wait(gr_engine *engine, uint64_t ticket, int64_t limit_ms, int32_t *late);

/* For tests and benchmarks: each unit of work takes `factor` (>= 1) times as long. A change ends the pauses that the
 * factor before it made. */
int32_t gr_engine_throttle(gr_engine *engine, double factor);

/* Copies boxes and formats. What the jobs and words point to must stay alive until the mailboxes are destroyed or
 * disarmed for the last time. */
int32_t gr_mailboxes_create(gr_engine *engine, const gr_mailbox *boxes, int32_t count, gr_mailboxes **mailboxes);

/* Disarms first. */
void gr_mailboxes_destroy(gr_mailboxes *mailboxes);

/* While mailboxes are armed the workers never sleep, and one that has no work looks at their requests. Jobs from
 * mailboxes and gr_submit run in the order in which they were seen. */
int32_t gr_mailboxes_arm(gr_mailboxes *mailboxes);

/* Waits for jobs of these mailboxes that were seen; later requests stay where they are. *failed: 1 if there is
 * something for gr_mailboxes_failure to tell. */
int32_t gr_mailboxes_disarm(gr_mailboxes *mailboxes, int32_t *failed);

/* 0: no job failed since the last call. Otherwise gr_last_error has the first one's sentence, *index its mailbox. */
int32_t gr_mailboxes_failure(gr_mailboxes *mailboxes, int32_t *index);

/* A mailbox whose request is unserved or whose job is under way; -1: none. */
int32_t gr_mailboxes_pending(const gr_mailboxes *mailboxes);

/* For a device that would wait for ever, and for good: drops requests, serves no more and raises done of each mailbox,
 * at once and also while jobs run. Then waits up to limit_ms for jobs that had been seen. *late: 1 if one may still
 * run, which will read its input and the experts, and write out, busy_ns and done; all that must stay alive, and so
 * must the mailboxes, until a call sets *late to 0. May be called again, which only waits. Never waits beyond the
 * limit, whichever threads hang. */
int32_t gr_mailboxes_abandon(gr_mailboxes *mailboxes, int64_t limit_ms, int32_t *late);

const char *gr_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
