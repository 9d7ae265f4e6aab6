// The C functions that Python calls. Structs hold only 64-bit fields, in the order in which `native.py` lists them.
#include "../elman/kernel.h"
#include "../gru/kernel.h"
#include "../lstm/kernel.h"
#include "../variant/backward.h"

using namespace torchecho;

// All else is hidden, so that two variants in one process never share a table of functions.
#pragma GCC visibility push(default)
extern "C" {

int64_t torchecho_lanes() { return kLanes; }

// Elements that a packed right operand of `depth` rows of them and `columns` columns of each part takes.
int64_t torchecho_panels_size(int64_t depth, int64_t columns, int64_t parts) {
  return ceil_div(columns, kLanes) * kLanes * parts * depth;
}

void torchecho_pack_transposed(const float* matrix, int64_t stride, int64_t depth, int64_t columns, int64_t parts,
                               int64_t pairs, float* to, int64_t threads) {
  with_team(threads, [&](const Team& team) { pack_transposed(team, matrix, stride, depth, columns, parts, pairs, to); });
}

void torchecho_pack_rows(const float* matrix, int64_t stride, int64_t depth, int64_t columns, int64_t begin,
                         int64_t pairs, float* to, int64_t threads) {
  with_team(threads, [&](const Team& team) { pack_rows(team, matrix, stride, depth, columns, begin, pairs, to); });
}

void torchecho_multiply(const Product* product, int64_t threads) {
  with_team(threads, [&](const Team& team) { multiply(team, *product); });
}

void torchecho_sum_rows(const RowSum* sum, int64_t threads) {
  with_team(threads, [&](const Team& team) { sum_rows(team, *sum); });
}

void torchecho_lstm_forward(const LstmForward* s) { lstm_forward(*s); }
void torchecho_lstm_rebuild(const LstmRebuild* s) { lstm_rebuild(*s); }
void torchecho_lstm_backward(const LstmBackward* s) { lstm_backward(*s); }
void torchecho_gru_forward(const GruForward* s) { gru_forward(*s); }
void torchecho_gru_backward(const GruBackward* s) { gru_backward(*s); }
void torchecho_elman_forward(const ElmanForward* s) { elman_forward(*s); }
void torchecho_elman_backward(const ElmanBackward* s) { elman_backward(*s); }
void torchecho_variant_forward(const VariantForward* s) { variant_forward(*s); }
void torchecho_variant_rebuild(const VariantForward* s) { variant_rebuild(*s); }
void torchecho_variant_backward(const VariantBackward* s) { variant_backward(*s); }
}
#pragma GCC visibility pop
