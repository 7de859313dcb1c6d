// The C ABI of libhf_flash2.so: the data that crosses from Python into the kernels.
// Plain data, no torch, no CUDA headers. What stays the same from call to call (shapes, strides, numbers) is packed once, as Params
// whose addresses are null; the addresses, which change, come beside them as Addresses, in the same order. Fields are ordered by size
// (8-byte fields first, then 4-byte) so that the layout has no holes except at the end; hf_flash2/kernels.py packs the same layout and
// the library refuses a struct whose size differs.
// Strides are in elements. "dense" means q [B, Sq, H, D]; "packed" means q [Tq, H, D] with cu_seqlens.
#pragma once
#include <stdint.h>

typedef struct HfFlash2Tensor {
  void* data;
  int64_t batch_stride;  // 0 when packed
  int64_t token_stride;
  int64_t head_stride;  // the head dim itself has stride 1
} HfFlash2Tensor;

// Where the tokens of sequence b lie. Exactly one of three forms:
//   cu_seqlens != null                 packed: tokens cu_seqlens[b] .. cu_seqlens[b + 1]          int32 [B + 1]
//   ranges != null                     dense with padding: tokens ranges[b] .. + ranges[B + b]    int32 [2, B] (start, length)
//   both null                          dense: tokens 0 .. max_seqlen
// Rows of a result outside of every range are written, too: zeros, and +inf in softmax_lse.
typedef struct HfFlash2Sequences {
  const int32_t* cu_seqlens;
  const int32_t* ranges;
} HfFlash2Sequences;

typedef struct HfFlash2ForwardParams {
  uint64_t struct_size;      // sizeof(HfFlash2ForwardParams), checked
  void* stream;              // cudaStream_t
  void* workspace;           // device scratch, 256-byte aligned, uninitialised; null where none is needed
  uint64_t workspace_bytes;  // at least hf_flash2_forward_workspace_bytes()

  HfFlash2Tensor q;    // [B, Sq, H, D] or [Tq, H, D]
  HfFlash2Tensor k;    // [B, Sk, Hk, D] or [Tk, Hk, D]; with a block_table [pages, page_size, Hk, D]
  HfFlash2Tensor v;    // [B, Sk, Hk, Dv] or [Tk, Hk, Dv]; with a block_table [pages, page_size, Hk, Dv]
  HfFlash2Tensor out;  // [B, Sq, H, Dv] or [Tq, H, Dv]

  float* softmax_lse;  // natural log, with the sinks; [B, H, Sq] or [H, Tq]; +inf for a row that sees no key
  int64_t lse_batch_stride;
  int64_t lse_head_stride;

  HfFlash2Sequences sequences_q;
  HfFlash2Sequences sequences_k;

  // Keys inside a range that are padding all the same ("holes"): uint8 [B, Sk], 1 = visible. Null when there are none. Then ranges of k
  // is [3, B] and its third row says for which sequences the mask has to be read at all.
  const uint8_t* key_mask;
  int64_t key_mask_batch_stride;

  const int64_t* rng_state;  // int64 [2] on the device: Philox key and counter offset; null unless dropout_p > 0

  const float* sinks;  // [H], or null: a logit for each query head that every row that sees a key counts in its sum, beside its scores

  // Of a paged cache: int32 [B, pages of the longest], the pages in which the keys of a sequence lie, one after the other. Then sequences_k
  // has ranges, which begin at 0. Null: batch entry b of k and v is that of q.
  const int32_t* block_table;
  int64_t block_table_stride;

  int32_t device;  // CUDA device index
  int32_t dtype;   // HfFlash2Dtype
  int32_t batch;
  int32_t heads_q;
  int32_t heads_k;       // divides heads_q
  int32_t head_dim;      // of q and k: a multiple of 8, at most 512
  int32_t head_dim_v;    // of v and out: likewise, smaller or greater than head_dim
  int32_t max_seqlen_q;  // Sq when dense, an upper bound of every length when packed
  int32_t max_seqlen_k;  // with a block_table, a bound of every length
  int32_t total_q;       // Tq when packed, else 0
  int32_t total_k;       // Tk when packed, else 0
  int32_t window_left;   // keys visible left of the diagonal, -1 = all. The diagonal is aligned to the bottom-right corner
  int32_t window_right;  // keys visible right of the diagonal, -1 = all; 0 = causal
  int32_t family;        // HfFlash2Family: which kernels to use; kAuto lets the library choose
  float softmax_scale;
  float dropout_p;
  float softcap;      // scores are softcap * tanh(score * softmax_scale / softcap); 0: they are not capped
  int32_t pages;      // of k and v; 0 without a block_table
  int32_t page_size;  // tokens of a page, a multiple of kPageMultiple; 0 without a block_table
  int32_t reserved;
} HfFlash2ForwardParams;

typedef struct HfFlash2BackwardParams {
  uint64_t struct_size;           // sizeof(HfFlash2BackwardParams), checked
  HfFlash2ForwardParams forward;  // as the forward got it, with its out and softmax_lse; its workspace is not read
  HfFlash2Tensor dout;            // as out
  HfFlash2Tensor dq;              // as q
  HfFlash2Tensor dk;              // as k
  HfFlash2Tensor dv;              // as v
  const float* dlse;              // gradient of softmax_lse, laid out like it; null = zero
  float* dsinks;                  // gradient of forward.sinks; null where there are none
  void* workspace;                // device scratch, 256-byte aligned, uninitialised
  uint64_t workspace_bytes;       // at least hf_flash2_backward_workspace_bytes()
  int32_t deterministic;          // non-zero: dq is bit-equal from run to run
  int32_t reserved;
} HfFlash2BackwardParams;

// What a call puts into the params of its layout.
typedef struct HfFlash2ForwardAddresses {
  void* stream;  // cudaStream_t
  void* workspace;
  void* q;
  void* k;
  void* v;
  void* out;
  float* softmax_lse;
  HfFlash2Sequences sequences_q;
  HfFlash2Sequences sequences_k;
  const uint8_t* key_mask;
  const int64_t* rng_state;
  const float* sinks;
  const int32_t* block_table;
} HfFlash2ForwardAddresses;

typedef struct HfFlash2BackwardAddresses {
  HfFlash2ForwardAddresses forward;
  void* dout;
  void* dq;
  void* dk;
  void* dv;
  const float* dlse;
  float* dsinks;
  void* workspace;
} HfFlash2BackwardAddresses;

// New keys and values written behind those of a cache, of one token each or more.
typedef struct HfFlash2AppendParams {
  uint64_t struct_size;  // sizeof(HfFlash2AppendParams), checked
  void* stream;          // cudaStream_t

  HfFlash2Tensor k;        // [B, S, Hk, D]
  HfFlash2Tensor v;        // [B, S, Hk, Dv]
  HfFlash2Tensor k_cache;  // [B, Sk, Hk, D]; with a block_table [pages, page_size, Hk, D]
  HfFlash2Tensor v_cache;  // likewise, Dv

  const int32_t* lengths;      // [B], tokens of each sequence in the cache so far. Below 0, and from capacity on, nothing is written
  int32_t* ranges;             // [2, B], the result: (0, length) of each sequence in the cache then
  const int32_t* block_table;  // as of HfFlash2ForwardParams, or null
  int64_t block_table_stride;

  int32_t device;  // CUDA device index
  int32_t batch;
  int32_t seqlen;
  int32_t heads;
  int32_t head_dim;  // multiples of 8
  int32_t head_dim_v;
  int32_t page_size;  // tokens of a page; 0 without a block_table
  int32_t capacity;   // tokens that a sequence may have: Sk, or page_size times the columns of block_table
} HfFlash2AppendParams;

typedef struct HfFlash2RotaryParams {
  uint64_t struct_size;  // sizeof(HfFlash2RotaryParams), checked
  void* stream;          // cudaStream_t

  HfFlash2Tensor q;      // [B, S, H, D]
  HfFlash2Tensor k;      // [B, S, Hk, D]
  HfFlash2Tensor q_out;  // as q
  HfFlash2Tensor k_out;  // as k

  const void* cos;             // [B or 1, S, rotary_dim], contiguous, of the tensors' type
  const void* sin;             // as cos
  int64_t angle_batch_stride;  // 0 when one row of angles serves the whole batch

  int32_t device;  // CUDA device index
  int32_t dtype;   // HfFlash2Dtype
  int32_t batch;
  int32_t seqlen;
  int32_t heads_q;
  int32_t heads_k;
  int32_t head_dim;    // a multiple of 8
  int32_t rotary_dim;  // a multiple of 16, at most head_dim; what is beyond it is copied
  int32_t inverse;     // non-zero: the transposed map, for gradients
} HfFlash2RotaryParams;

typedef struct HfFlash2CrossEntropyParams {
  uint64_t struct_size;  // sizeof(HfFlash2CrossEntropyParams), checked
  void* stream;          // cudaStream_t

  void* logits;           // [rows, columns]; replaced by the gradient of the sum of the losses
  const int64_t* labels;  // [rows], each a class: 0 .. columns - 1
  float* losses;          // [rows]
  int64_t row_stride;     // of logits, at least columns

  int32_t device;  // CUDA device index
  int32_t dtype;   // HfFlash2Dtype of logits
  int32_t rows;
  int32_t columns;
} HfFlash2CrossEntropyParams;

enum HfFlash2Dtype { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };  // float32: of logits only
enum { kPageMultiple = 128 };                                      // blocks of keys do not cross a page
enum HfFlash2Family { kAuto = 0, kSm80 = 80, kSm90 = 90 };

// Return codes of every operation: the family that ran (80 or 90), or one of these.
enum HfFlash2Error {
  kErrorAbi = -1,          // struct_size differs: library and Python package are of different versions
  kErrorArgument = -2,     // a value no kernel accepts; hf_flash2_last_error() names it
  kErrorUnsupported = -3,  // this device, or this build of the library, has no kernel for it
  kErrorCuda = -4,         // the CUDA runtime refused; hf_flash2_last_error() has its words
  kErrorMisaligned = -5,   // an address is no multiple of 16; a copy of the tensor would do
  kErrorWorkspace = -6,    // of a forward: workspace_bytes is too small. Nothing ran; ask for the size and call again
};
