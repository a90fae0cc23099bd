// The entry: plain calls from Python to csrc/call, in CPython's limited API. It reads tensors through PyTorch's DLPack
// exchange API, without PyTorch's dispatcher. If it has no result, it returns the reason, a call::Answer.
#include <exception>
#include <string>

#include "python/plain.h"
#include "python/state.h"
#include "python/torch.h"

namespace epigemm::python {
namespace {

constexpr int kFolded = 6;

// The arguments of a BatchNorm fold: (bias, scale, running_mean, running_var, bn_weight, bn_bias, eps).
struct Fold {
  call::Tensor storage[kFolded];
  call::FoldVectors vectors;

  bool read(Reader& reader, PyObject* given) {
    if (!PyTuple_Check(given) || PyTuple_Size(given) != kFolded + 1) return false;
    for (int i = 0; i < kFolded; ++i) {
      if (!reader.read_optional(PyTuple_GetItem(given, i), &storage[i], &vectors.vectors[i])) return false;
    }
    PyObject* const eps = PyTuple_GetItem(given, kFolded);
    vectors.eps = PyFloat_CheckExact(eps) ? PyFloat_AsDouble(eps) : -1;
    return true;
  }
};

// The epilogue's operands in its order: tensors, numbers, or None for an absent one; or the vectors from which they are
// folded.
struct OperandTuple {
  call::Tensor storage[kMaxOperands];
  Fold fold;

  bool read(Reader& reader, PyObject* given, PyObject* folded, call::GivenOperands* operands) {
    if (folded != Py_None) {
      operands->fold = &fold.vectors;
      return fold.read(reader, folded);
    }
    if (!PyTuple_Check(given) || PyTuple_Size(given) > kMaxOperands) return false;
    operands->count = static_cast<int>(PyTuple_Size(given));
    for (int i = 0; i < operands->count; ++i) {
      if (!reader.read_operand(PyTuple_GetItem(given, i), &storage[i], &operands->values[i])) return false;
    }
    return true;
  }
};

// Arguments of calls that are recorded by a node of epigemm, if at all.
struct ByNode {
  static call::Answer recorder() { return call::Answer::Recorded; }
};

// linear(epilogue, x, weight, operands, fold, out, fp32, packs, slices, strict, invariant, circumstances, plan,
//        weight2, stored, columns, blocks, eight_bits, group_ends) -> Tensor | (Tensor, int) | int
//   fp32: a row of call::fp32_orders
//   circumstances: a sum of call::Circumstances
//   packs: None, or the weight's for split and for scaled, each a tensor or None; slices: see call/forced.h
//   plan: None, or a tuple, see call/forced.h
//   weight2: None, or of a pair of products, whose first matrix is None among the operands
//   stored, columns, blocks: None, or stored, column_moments and column_blocks of call/linear.h
//   group_ends: None, or as of call/linear.h
//   eight_bits: None, or (x_scale, weight_scale, out_scale, the result's dtype, and its ElementType) of call/linear.h
//   with columns the result is a pair, the second of which is left_rows
struct LinearArguments {
  enum {
    Epilogue,
    X,
    Weight,
    Operands,
    Folded,
    Out,
    FP32,
    Packs,
    Slices,
    Strict,
    Invariant,
    Circumstances,
    Plan,
    Weight2,
    Stored,
    Columns,
    Blocks,
    EightBits,
    GroupEnds,
    Count
  };
  call::Tensor x, weight, weight2, out, stored, columns, blocks, x_scale, weight_scale, out_scale, group_ends;
  OperandTuple operands;
  call::LinearCall linear;
  call::ForcedPlan forced;

  bool read(Reader& reader, PyObject* const* given) {
    linear.epilogue = static_cast<EpilogueId>(PyLong_AsLong(given[Epilogue]));
    linear.fp32_order = static_cast<int>(PyLong_AsLong(given[FP32]));
    state.functions->read_slices(PyLong_AsLong(given[Slices]), &linear);
    linear.is_strict = given[Strict] == Py_True;
    if (!linear.is_strict && given[Strict] != Py_False) return false;
    linear.is_batch_invariant = given[Invariant] == Py_True;
    const long circumstances = PyLong_AsLong(given[Circumstances]);
    linear.needs_other_setting = circumstances & call::kOtherSetting;
    linear.is_out_apart = circumstances & call::kOutApart;
    linear.is_out_padded = circumstances & call::kOutPadded;
    linear.x = &x;
    linear.weight = &weight;
    if (!reader.read(given[X], &x) || !reader.read(given[Weight], &weight) ||
        !reader.read_optional(given[Weight2], &weight2, &linear.weight2) ||
        !reader.read_optional(given[Out], &out, &linear.out) ||
        !reader.read_optional(given[Stored], &stored, &linear.stored) ||
        !reader.read_optional(given[Columns], &columns, &linear.column_moments) ||
        !reader.read_optional(given[Blocks], &blocks, &linear.column_blocks) ||
        !reader.read_integers(given[GroupEnds], &group_ends, &linear.group_ends) ||
        !read_eight_bits(reader, given[EightBits])) {
      return false;
    }
    return operands.read(reader, given[Operands], given[Folded], &linear.operands) && read_packs(given[Packs]) &&
           read_plan(given[Plan]);
  }

  PyObject* run(PyObject* const* given) {
    if (weight.dim != 2 && weight.dim != 3) return reason(call::Answer::DoesNotFit);
    int left_rows = 0;
    linear.left_rows = &left_rows;
    PyObject* const vectors = linear.operands.fold ? given[Folded] : given[Operands];
    const bool raises_shortage = PyLong_AsLong(given[Circumstances]) & call::kRaisesShortage;
    PythonTorch torch({given[X], given[Weight], nullptr, vectors, given[Out], dtype_}, x, weight.sizes[weight.dim - 2],
                      raises_shortage);
    PyObject* const found = torch.finish(state.functions->linear(linear, torch));
    if (!found || !linear.column_moments || PyLong_Check(found)) return found;
    return Py_BuildValue("(Ni)", found, left_rows);
  }

  call::Answer recorder() const { return state.functions->recorder_of(linear); }

 private:
  PyObject* dtype_ = nullptr;  // of the result, if it is not x's

  bool read_eight_bits(Reader& reader, PyObject* given) {
    if (given == Py_None) return true;
    constexpr Py_ssize_t kParts = 5;
    if (!PyTuple_Check(given) || PyTuple_Size(given) != kParts) return false;
    call::EightBits& eight_bits = linear.eight_bits;
    dtype_ = PyTuple_GetItem(given, 3);
    eight_bits.result = static_cast<ElementType>(PyLong_AsLong(PyTuple_GetItem(given, 4)));
    return reader.read_operand(PyTuple_GetItem(given, 2), &out_scale, &eight_bits.out_scale) &&
           reader.read_optional(PyTuple_GetItem(given, 0), &x_scale, &eight_bits.x_scale) &&
           reader.read_optional(PyTuple_GetItem(given, 1), &weight_scale, &eight_bits.weight_scale);
  }

  bool read_packs(PyObject* packs) {
    if (packs == Py_None) return true;
    return PyTuple_Check(packs) && PyTuple_Size(packs) == 2 && read_pack(PyTuple_GetItem(packs, 0), &linear.split) &&
           read_pack(PyTuple_GetItem(packs, 1), &linear.scaled);
  }

  static bool read_pack(PyObject* pack, call::WeightSlices* slices) {
    if (pack == Py_None) return true;
    DLTensor view;
    if (state.exchange->dltensor_from_py_object_no_sync(pack, &view) != 0) {
      PyErr_Clear();
      return false;
    }
    slices->pack = static_cast<char*>(view.data) + view.byte_offset;
    return true;
  }

  bool read_plan(PyObject* plan) {
    if (plan == Py_None) return true;
    constexpr Py_ssize_t kMost = 6;
    int64_t numbers[kMost];
    const Py_ssize_t count = PyTuple_Check(plan) ? PyTuple_Size(plan) : 0;
    for (Py_ssize_t i = 0; i < count && i < kMost; ++i) numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(plan, i));
    if (PyErr_Occurred()) return false;
    const std::string wrong =
        state.functions->read_forced(numbers, static_cast<std::size_t>(count), linear.weight2 != nullptr, &forced);
    if (!wrong.empty()) PyErr_Format(PyExc_RuntimeError, "plan: %s", wrong.c_str());
    linear.forced = &forced;
    return wrong.empty();
  }
};

// A transposed view of a matrix.
struct Transposed {
  call::Tensor tensor;

  explicit Transposed(const call::Tensor& matrix) : tensor(matrix) {
    for (int axis = 0; axis < 2; ++axis) {
      sizes_[axis] = matrix.sizes[1 - axis];
      strides_[axis] = matrix.strides[1 - axis];
    }
    tensor.sizes = sizes_;
    tensor.strides = strides_;
  }
  Transposed(const Transposed&) = delete;
  Transposed& operator=(const Transposed&) = delete;

 private:
  int64_t sizes_[2], strides_[2];
};

// A matrix of a backward pass.
struct Factor {
  PyObject* object = nullptr;
  call::Tensor view;

  bool read(Reader& reader, PyObject* given) {
    object = given;
    return reader.read(object, &view) && view.dim == 2;
  }
};

// products(rows, x, weight, fp32, circumstances) -> (Tensor | int | None, Tensor | int | None) | int: rows @ weight and
// rows.T @ x, where the weight and where x is not None; fp32 as above
struct ProductsArguments : ByNode {
  enum { Rows, X, Weight, FP32, Circumstances, Count };
  Factor rows, x, weight;
  int fp32_order = 0;
  bool needs_other_setting = false;

  bool read(Reader& reader, PyObject* const* given) {
    fp32_order = static_cast<int>(PyLong_AsLong(given[FP32]));
    needs_other_setting = PyLong_AsLong(given[Circumstances]) & call::kOtherSetting;
    return rows.read(reader, given[Rows]) && (given[X] == Py_None || x.read(reader, given[X])) &&
           (given[Weight] == Py_None || weight.read(reader, given[Weight]));
  }

  PyObject* run(PyObject* const*) const {
    const Object of_x = weight.object ? Object(multiply(rows, weight)) : Object::borrowed(Py_None);
    if (!of_x) return nullptr;
    Object of_weight = Object::borrowed(Py_None);
    if (x.object) {
      const Transposed columns(rows.view);
      const Object transposed = call_method(rows.object, state.transpose);
      if (!transposed) return nullptr;
      of_weight = Object(multiply({transposed.get(), columns.tensor}, x));
    }
    return of_weight ? PyTuple_Pack(2, of_x.get(), of_weight.get()) : nullptr;
  }

 private:
  // left @ right, or the reason why there is no result.
  PyObject* multiply(const Factor& left, const Factor& right) const {
    const Transposed transposed(right.view);
    call::LinearCall linear;
    linear.fp32_order = fp32_order;
    linear.needs_other_setting = needs_other_setting;
    linear.x = &left.view;
    linear.weight = &transposed.tensor;
    linear.operands.count = 1;  // no bias
    PythonTorch torch({left.object, nullptr, right.object, Py_None, Py_None}, left.view, transposed.tensor.sizes[0]);
    return torch.finish(state.functions->linear(linear, torch));
  }
};

// elementwise(epilogue, x, operands, fold, out, circumstances) -> Tensor | int
struct ElementwiseArguments : ByNode {
  enum { Epilogue, X, Operands, Folded, Out, Circumstances, Count };
  call::Tensor x, out;
  OperandTuple operands;
  call::ElementwiseCall elementwise;

  bool read(Reader& reader, PyObject* const* given) {
    elementwise.epilogue = static_cast<EpilogueId>(PyLong_AsLong(given[Epilogue]));
    elementwise.x = &x;
    elementwise.is_out_apart = PyLong_AsLong(given[Circumstances]) & call::kOutApart;
    if (!reader.read(given[X], &x) || !reader.read_optional(given[Out], &out, &elementwise.out)) return false;
    return operands.read(reader, given[Operands], given[Folded], &elementwise.operands);
  }

  PyObject* run(PyObject* const* given) const {
    PythonTorch torch({given[X], nullptr, nullptr, Py_None, given[Out]}, x, 0);
    return torch.finish(state.functions->elementwise(elementwise, torch));
  }
};

// derivative(epilogue, grad, x, operands, sums, circumstances) -> Tensor | int
//   sums: see call/elementwise.h; may be None
struct DerivativeArguments : ByNode {
  enum { Epilogue, Grad, X, Operands, Sums, Circumstances, Count };
  call::Tensor grad, x, sums;
  OperandTuple operands;
  call::DerivativeCall derivative;

  bool read(Reader& reader, PyObject* const* given) {
    derivative.epilogue = static_cast<EpilogueId>(PyLong_AsLong(given[Epilogue]));
    derivative.grad = &grad;
    derivative.x = &x;
    return reader.read(given[Grad], &grad) && reader.read(given[X], &x) &&
           reader.read_optional(given[Sums], &sums, &derivative.sums) &&
           operands.read(reader, given[Operands], Py_None, &derivative.operands);
  }

  PyObject* run(PyObject* const* given) const {
    PythonTorch torch({given[X], nullptr, nullptr, Py_None, Py_None}, x, 0);
    return torch.finish(state.functions->derivative(derivative, torch));
  }
};

bool has_count(Py_ssize_t count, int wanted) {
  if (count == wanted) return true;
  PyErr_Format(PyExc_TypeError, "got %zd arguments; accepted are %d", count, wanted);
  return false;
}

// A function of the module: reads a call's arguments, and makes the call if it is plain.
template <class Arguments>
PyObject* answer(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!has_count(count, Arguments::Count)) return nullptr;
  Reader reader(PyLong_AsLong(given[Arguments::Circumstances]));
  Arguments arguments;
  const call::Answer found = reader.found(reader.begin() && arguments.read(reader, given));
  if (PyErr_Occurred()) return nullptr;
  if (found != call::Answer::Done && found != call::Answer::Recorded) return reason(found);
  try {
    return found == call::Answer::Done ? arguments.run(given) : reason(arguments.recorder());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// sees(*tensors) -> int: the route of a call of these tensors (a None is skipped). Done: it is plain. Recorded: only
// autograd has to record it. NotPlain: a mode, a tracer or a transform has to intercept it. Autocast's casts were made
// before.
PyObject* sees(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Reader reader(/*circumstances=*/0);
  bool is_read = reader.begin_seen();
  for (Py_ssize_t i = 0; is_read && i < count; ++i) {
    call::Tensor tensor;
    is_read = given[i] == Py_None || reader.read_any(given[i], &tensor);
  }
  return PyErr_Occurred() ? nullptr : reason(reader.found(is_read));
}

// init(exchange_api, functions, members): to be called before all others.
PyObject* init(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!has_count(count, 3) || !fill_state(given[0], given[1], given[2])) return nullptr;
  Py_RETURN_NONE;
}

template <class Function>
PyMethodDef method(const char* name, Function function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, nullptr};
}

}  // namespace
}  // namespace epigemm::python

PyMODINIT_FUNC PyInit__entry() {
  using namespace epigemm::python;
  static PyMethodDef methods[] = {method("init", &init),
                                  method("sees", &sees),
                                  method("linear", &answer<LinearArguments>),
                                  method("products", &answer<ProductsArguments>),
                                  method("elementwise", &answer<ElementwiseArguments>),
                                  method("derivative", &answer<DerivativeArguments>),
                                  {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_entry", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
