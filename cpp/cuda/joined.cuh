// Where a lane stands among the joined rows of rows.cuh.
#pragma once

#include "rows.cuh"

namespace upfold::cuda {

// Channel tile inside the block's, sample, and unit on every axis.
struct Place {
  std::uint32_t channel_tile, n, d, h, w;
};

UPFOLD_DEVICE Place place_of(const RowsJob& job, std::uint32_t position) {
  Place place;
  place.w = take(job.w.units, position);
  place.h = take(job.h.units, position);
  place.d = take(job.d.units, position);
  place.n = take(job.samples, position);
  place.channel_tile = position;
  return place;
}

}  // namespace upfold::cuda
