// Runs ExecuTorch programs behind a C interface, so that Python reaches them through ctypes and without torch.
//
// Links against the libraries and headers that the executorch wheel ships. One handle is one program with its
// loaded methods; the caller uses a handle from one thread at a time. Inputs are passed by pointer and outputs
// returned by pointer: the memory of an output stays until the next run of the same handle. No exception
// leaves a function: failures return a negative number or null, and outrider_et_error() says why.

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/platform/platform.h>

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Method;
using executorch::runtime::MethodMeta;
using executorch::runtime::Program;
using executorch::runtime::Result;
using executorch::runtime::Tag;
using executorch::runtime::TensorInfo;

namespace {

constexpr int kMaxRank = 8;
constexpr size_t kMaxMessage = 4000;  // a damaged program can log without end

thread_local std::string last_error;
thread_local std::string* capture = nullptr;  // where the runtime's own messages go during a call of ours
pal_emit_log_message_method print_message = nullptr;

void keep_message(
    et_timestamp_t timestamp,
    et_pal_log_level_t level,
    const char* filename,
    const char* function,
    size_t line,
    const char* message,
    size_t length) {
  const bool grave = level == kError || level == kFatal;
  if (capture != nullptr) {
    if (grave && capture->size() < kMaxMessage) {
      if (!capture->empty()) capture->append("; ");
      capture->append(message, length);
    }
  } else if (print_message != nullptr && grave && std::strstr(message, "register_pal()") == nullptr) {
    print_message(timestamp, level, filename, function, line, message, length);
  }
}

// The table is changed in place: registering another one would log an error when torch's bindings, in the same
// process, registered theirs before. They may also come later, so every `open` looks again.
void take_over_messages() {
  auto* table = const_cast<executorch::runtime::PalImpl*>(executorch::runtime::get_pal_impl());
  if (table->emit_log_message == keep_message) return;
  print_message = table->emit_log_message;
  table->emit_log_message = keep_message;
}

// Collects what the runtime logs while it is in scope; `fail` makes it the error of this thread.
class Messages {
 public:
  Messages() {
    capture = &text_;
  }
  ~Messages() {
    capture = nullptr;
  }
  int fail(const std::string& what) {
    last_error = text_.empty() ? what : what + " (" + text_ + ")";
    return -1;
  }
  int fail(const std::string& what, Error error) {
    return fail(what + ": " + executorch::runtime::to_string(error));
  }

 private:
  std::string text_;
};

struct Loaded {
  std::string name;
  Method* method;
  size_t inputs;
  std::vector<EValue> outputs;
};

struct Handle {
  std::unique_ptr<Module> module;
  std::vector<std::string> names;
  std::vector<Loaded> loaded;
};

void describe(const TensorInfo& info, int32_t* dtype, int32_t* rank, int64_t* sizes) {
  *dtype = static_cast<int32_t>(info.scalar_type());
  *rank = static_cast<int32_t>(info.sizes().size());
  for (int i = 0; i < *rank && i < kMaxRank; ++i) sizes[i] = info.sizes()[i];
}

template <typename Call>
int guarded(Call call) {
  Messages messages;
  try {
    return call(messages);
  } catch (const std::exception& error) {
    return messages.fail(error.what());
  } catch (...) {
    return messages.fail("an unknown C++ exception");
  }
}

}  // namespace

extern "C" {

// The reason of the last failure on this thread.
const char* outrider_et_error() {
  return last_error.c_str();
}

// Maps a program into memory and checks that its structure is sound; null when that fails.
void* outrider_et_open(const char* path) {
  take_over_messages();
  std::unique_ptr<Handle> handle;
  const int status = guarded([&](Messages& messages) {
    auto made = std::make_unique<Handle>();
    made->module = std::make_unique<Module>(std::string(path), Module::LoadMode::Mmap);
    Error error = made->module->load(Program::Verification::InternalConsistency);
    if (error != Error::Ok) return messages.fail("cannot read the program", error);
    auto program = made->module->program();
    for (size_t i = 0; i < program->num_methods(); ++i) {
      auto name = program->get_method_name(i);
      if (!name.ok()) return messages.fail("cannot read a method's name", name.error());
      made->names.emplace_back(*name);
    }
    handle = std::move(made);
    return 0;
  });
  return status == 0 ? handle.release() : nullptr;
}

void outrider_et_close(void* opened) {
  guarded([&](Messages&) {
    delete static_cast<Handle*>(opened);
    return 0;
  });
}

int outrider_et_num_methods(void* opened) {
  return static_cast<int>(static_cast<Handle*>(opened)->names.size());
}

const char* outrider_et_method_name(void* opened, int index) {
  return static_cast<Handle*>(opened)->names.at(index).c_str();
}

// Sizes of a method before it is loaded: the numbers of inputs and outputs.
int outrider_et_arity(void* opened, const char* name, int32_t* inputs, int32_t* outputs) {
  return guarded([&](Messages& messages) {
    auto meta = static_cast<Handle*>(opened)->module->method_meta(name);
    if (!meta.ok()) return messages.fail(std::string("no method ") + name, meta.error());
    *inputs = static_cast<int32_t>(meta->num_inputs());
    *outputs = static_cast<int32_t>(meta->num_outputs());
    return 0;
  });
}

// dtype (ExecuTorch's ScalarType), rank and the largest sizes of an input (or output) tensor of a method.
int outrider_et_tensor(
    void* opened, const char* name, int output, int index, int32_t* dtype, int32_t* rank, int64_t* sizes) {
  return guarded([&](Messages& messages) {
    auto meta = static_cast<Handle*>(opened)->module->method_meta(name);
    if (!meta.ok()) return messages.fail(std::string("no method ") + name, meta.error());
    auto tag = output ? meta->output_tag(index) : meta->input_tag(index);
    if (!tag.ok() || *tag != Tag::Tensor) return messages.fail("an input or output is not a tensor");
    auto info = output ? meta->output_tensor_meta(index) : meta->input_tensor_meta(index);
    if (!info.ok()) return messages.fail("cannot read a tensor's sizes", info.error());
    describe(*info, dtype, rank, sizes);
    return 0;
  });
}

// Loads a method, which lets delegates pack their weights; returns its number for the calls below.
int outrider_et_load(void* opened, const char* name) {
  return guarded([&](Messages& messages) {
    auto* handle = static_cast<Handle*>(opened);
    Error error = handle->module->load_method(name);
    if (error != Error::Ok) return messages.fail(std::string("cannot load method ") + name, error);
    auto method = handle->module->method(name);
    if (!method.ok()) return messages.fail(std::string("cannot load method ") + name, method.error());
    const MethodMeta meta = (*method)->method_meta();
    handle->loaded.push_back(
        {name, *method, meta.num_inputs(), std::vector<EValue>(meta.num_outputs())});
    return static_cast<int>(handle->loaded.size()) - 1;
  });
}

// Runs a loaded method. `data`, `dtypes` and `ranks` have an entry for each input, `sizes` kMaxRank of them.
int outrider_et_run(
    void* opened,
    int number,
    int count,
    void* const* data,
    const int32_t* dtypes,
    const int32_t* ranks,
    const int64_t* sizes) {
  return guarded([&](Messages& messages) {
    Loaded& loaded = static_cast<Handle*>(opened)->loaded.at(number);
    if (static_cast<size_t>(count) != loaded.inputs) {
      return messages.fail(
          loaded.name + " takes " + std::to_string(loaded.inputs) + " inputs, " + std::to_string(count) +
          " were given");
    }
    for (int i = 0; i < count; ++i) {
      TensorImpl::SizesType shape[kMaxRank];
      TensorImpl::DimOrderType order[kMaxRank];
      TensorImpl::StridesType strides[kMaxRank];
      int64_t step = 1;
      for (int axis = ranks[i] - 1; axis >= 0; --axis) {
        shape[axis] = static_cast<TensorImpl::SizesType>(sizes[i * kMaxRank + axis]);
        order[axis] = static_cast<TensorImpl::DimOrderType>(axis);
        strides[axis] = static_cast<TensorImpl::StridesType>(step);
        step *= shape[axis];
      }
      TensorImpl tensor(
          static_cast<ScalarType>(dtypes[i]), ranks[i], shape, data[i], order, strides);
      Error error = loaded.method->set_input(EValue(Tensor(&tensor)), i);
      if (error != Error::Ok) {
        return messages.fail("input " + std::to_string(i) + " of " + loaded.name, error);
      }
    }
    Error error = loaded.method->execute();
    if (error != Error::Ok) return messages.fail("method " + loaded.name, error);
    error = loaded.method->get_outputs(loaded.outputs.data(), loaded.outputs.size());
    if (error != Error::Ok) return messages.fail("outputs of " + loaded.name, error);
    return 0;
  });
}

// Where the outputs of the last run are and how large they are; the layout of the arrays is that of `run`.
int outrider_et_outputs(void* opened, int number, const void** data, int32_t* ranks, int64_t* sizes) {
  return guarded([&](Messages& messages) {
    Loaded& loaded = static_cast<Handle*>(opened)->loaded.at(number);
    for (size_t i = 0; i < loaded.outputs.size(); ++i) {
      if (!loaded.outputs[i].isTensor()) return messages.fail("an output is not a tensor");
      const Tensor tensor = loaded.outputs[i].toTensor();
      data[i] = tensor.const_data_ptr();
      ranks[i] = static_cast<int32_t>(tensor.dim());
      for (int axis = 0; axis < ranks[i] && axis < kMaxRank; ++axis) {
        sizes[i * kMaxRank + axis] = tensor.size(axis);
      }
    }
    return 0;
  });
}

// The memory of a mutable buffer by its name, for programs that keep the names; null when there is none.
void* outrider_et_buffer(void* opened, int number, const char* name, int32_t* rank, int64_t* sizes) {
  void* data = nullptr;
  guarded([&](Messages& messages) {
    Loaded& loaded = static_cast<Handle*>(opened)->loaded.at(number);
    auto tensor = loaded.method->get_attribute(name);
    if (!tensor.ok()) return messages.fail(std::string("no buffer ") + name, tensor.error());
    *rank = static_cast<int32_t>(tensor->dim());
    for (int axis = 0; axis < *rank && axis < kMaxRank; ++axis) sizes[axis] = tensor->size(axis);
    data = tensor->mutable_data_ptr();
    return 0;
  });
  return data;
}

}  // extern "C"
