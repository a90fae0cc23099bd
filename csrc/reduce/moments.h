// Column statistics of a matrix: the mean and the biased variance of each column over its M rows. Blocks of rows are
// reduced first, each column of a block to its mean and the sum of its squared deviations from that mean. Then the
// blocks are merged (column_moments.h). All sums are of deviations from a number of the block, the pivot: sums of the
// numbers' squares would lose the variance of a column whose mean is large.
//
// T. F. Chan, G. H. Golub, R. J. LeVeque: Algorithms for computing the sample variance, The American Statistician 37
// (1983).
#pragma once

#include "epilogue/operands.h"

namespace epigemm {

// Of one column in one block of rows. The blocks of a matrix are stored as [blocks][columns].
template <class Real>
struct alignas(2 * sizeof(Real)) BlockMoments {
  Real mean, squares;  // squares: the sum of the squared deviations from the mean
};

// The pivot that a number makes: itself, so that its distance from the mean costs the sums no more accuracy than its
// own deviation is worth. Of an infinity or NaN it is 0: an infinity less itself is NaN, where the sum is infinite.
template <class Real>
EPIGEMM_HOST_DEVICE Real pivot_of(Real number) {
  return number - number == 0 ? number : Real(0);
}

// Sums over one column of a block. The pivot is that of one of the summed numbers.
template <class Real>
struct PivotSums {
  Real pivot, sum = 0, squares = 0;

  EPIGEMM_HOST_DEVICE void add(Real number) {
    const Real deviation = number - pivot;
    sum += deviation;
    squares += deviation * deviation;
  }

  // `count`: of the numbers that were added.
  EPIGEMM_HOST_DEVICE BlockMoments<Real> moments(int count) const { return shifted(sum / static_cast<Real>(count)); }

  // The same, with 1 / count as exact as a few roundings.
  EPIGEMM_HOST_DEVICE BlockMoments<Real> moments_by(Real inverse) const { return shifted(sum * inverse); }

 private:
  EPIGEMM_HOST_DEVICE BlockMoments<Real> shifted(Real shift) const {
    const Real left = squares - sum * shift;
    return {pivot + shift, left < 0 ? Real(0) : left};  // NaN stays
  }
};

}  // namespace epigemm
