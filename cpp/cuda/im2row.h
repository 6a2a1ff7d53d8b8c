// Columns of a y whose channels are innermost, as rows: of every input position the channels of each tap.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Whether y lies so, without groups, and its rows can be counted.
bool fits_im2row(const Problem& p);

// rows[(n, id, ih, iw)][(kd, kh, kw)][oc] = y(n, oc, i * stride - pad + k * dilation), zero outside of y; of any type, for a
// problem that fits. `rows` is aligned to 16 bytes. The device is current.
void im2row(const Launch& launch, const Problem& p, const void* y, void* rows);

}  // namespace upfold::cuda
