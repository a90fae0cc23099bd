// All that an epilogue made of a Python function may call: docs/epilogues.md lists it,
// epigemm/epilogues/tracer/steps.py decides.
#pragma once

#include "epilogue/primitives/activations.h"
