// A device "cuda" for torch's CPU build: its memory is the host's, its kernels are the CPU's, both counted and limited.
//
// bench/pretend_card.py compiles and loads this file before torch is imported. Every operator of the dispatch key CUDA
// falls back to the CPU's on aliases of the same memory, but for the few below that make or move tensors.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>

using namespace c10;

static const Device CARD(DeviceType::CUDA, 0);
static const Device CPU(DeviceType::CPU);

// ---- one device, one stream ----------------------------------------------------------------------------------

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Stream stream() { return Stream(Stream::DEFAULT, CARD); }
  Device exchangeDevice(Device) const override { return CARD; }
  Device getDevice() const override { return CARD; }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
static impl::DeviceGuardImplRegistrar guard_registrar(DeviceType::CUDA, new Guard());

// ---- memory --------------------------------------------------------------------------------------------------

static std::atomic<int64_t> allocated{0}, peak{0}, limit{0};

struct Block {
  void* data;
  int64_t bytes;
};

static void free_block(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<Block*>(context);
  free(block->data);
  allocated -= block->bytes;
  delete block;
}

struct CardAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    if (n == 0) return DataPtr(nullptr, nullptr, &free_block, CARD);
    int64_t bytes = (n + 511) / 512 * 512;  // as CUDA's allocator rounds
    int64_t now = allocated += bytes;
    if (limit && now > limit) {
      allocated -= bytes;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", n, " bytes (pretended card)");
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, bytes) == 0, "the host is out of memory");
    int64_t before = peak;
    while (now > before && !peak.compare_exchange_weak(before, now)) {
    }
    return DataPtr(data, new Block{data, bytes}, &free_block, CARD);
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static CardAllocator card_allocator;
static struct Registered {
  Registered() { SetAllocator(DeviceType::CUDA, &card_allocator, 100); }
} registered;

extern "C" int64_t card_allocated() { return allocated; }
extern "C" int64_t card_peak() { return peak; }
extern "C" void card_reset_peak() { peak = allocated.load(); }
extern "C" void card_set_limit(int64_t bytes) { limit = bytes; }

// ---- random numbers and hooks --------------------------------------------------------------------------------

struct CardGenerator final : at::CPUGeneratorImpl {
  explicit CardGenerator(uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = CARD;
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
};

static at::Generator& card_generator() {
  static at::Generator generator = at::make_generator<CardGenerator>(default_rng_seed_val);
  return generator;
}

extern "C" void card_seed(uint64_t seed) { card_generator().set_current_seed(seed); }
extern "C" int64_t card_get_rng_state(void* to) {
  auto state = card_generator().get_state();
  memcpy(to, state.data_ptr(), state.nbytes());
  return state.nbytes();
}
extern "C" void card_set_rng_state(const void* from, int64_t n) {
  auto state = at::empty({n}, at::kByte);
  memcpy(state.data_ptr(), from, n);
  card_generator().set_state(state);
}

// ATen looks these up by the name of the class.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return card_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<CardGenerator>(default_rng_seed_val);
  }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return GetAllocator(DeviceType::CPU); }
  Device getDeviceFromPtr(void*) const override { return CARD; }
};
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// ---- the same memory on the other device ---------------------------------------------------------------------

static at::Tensor alias(const at::Tensor& t, Device device) {
  auto* kept = new Storage(t.storage());  // until the alias is gone
  DataPtr data(kept->mutable_data(), kept, [](void* context) { delete static_cast<Storage*>(context); }, device);
  Allocator* allocator = device.is_cuda() ? &card_allocator : GetAllocator(DeviceType::CPU);
  Storage storage(Storage::use_byte_size_t(), kept->nbytes(), std::move(data), allocator, true);
  DispatchKeySet keys(device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  return out;
}

static at::Tensor on_cpu(const at::Tensor& t) { return t.is_cuda() ? alias(t, CPU) : t; }

// ---- every other operator: the CPU's -------------------------------------------------------------------------

struct Aliases {
  std::string op;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // (on the CPU, on the card)

  at::Tensor to_cpu(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      bool takes_both = op.find("index") != std::string::npos || op.find("copy") != std::string::npos;
      TORCH_CHECK(t.dim() == 0 || takes_both, "Expected all tensors to be on the same device, but found at least two "
                  "devices, cuda:0 and cpu! (in ", op, ")");
      return t;
    }
    for (auto& [cpu, card] : pairs)
      if (card.is_same(t)) return cpu;
    // A CPU takes a hundred times as long for matmuls in float16; a card sums them in float32, too.
    bool widens = op.find("mm.out") != std::string::npos && t.scalar_type() == at::kHalf;
    pairs.emplace_back(widens ? alias(t, CPU).to(at::kFloat) : alias(t, CPU), t);
    return pairs.back().first;
  }

  // A tensor that was an argument is that argument again, which the operator may have resized.
  at::Tensor to_card(const at::Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& [cpu, card] : pairs) {
      if (!cpu.is_same(t)) continue;
      if (cpu.scalar_type() != card.scalar_type()) {
        alias(card, CPU).copy_(t);
      } else if (card.sizes() != t.sizes() || card.storage().data() != t.storage().data()) {
        auto* impl = card.unsafeGetTensorImpl();
        impl->set_storage_keep_dtype(copied_if_new(t).storage());
        impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      }
      return card;
    }
    return copied_if_new(t);
  }

  // What the CPU allocated counts as the card's memory: it is copied there, unless it is a view of an argument.
  at::Tensor copied_if_new(const at::Tensor& t) {
    for (auto& [cpu, card] : pairs)
      if (card.storage().data() == t.storage().data()) return alias(t, CARD);
    Storage storage(Storage::use_byte_size_t(), t.storage().nbytes(), card_allocator.allocate(t.storage().nbytes()),
                    &card_allocator, true);
    if (t.storage().nbytes()) memcpy(storage.mutable_data(), t.storage().data(), t.storage().nbytes());
    auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), t.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return out;
  }
};

static void on_the_cpu(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Aliases aliases{toString(op.operator_name()), {}};
  size_t first = stack->size() - schema.arguments().size();
  at::Generator owner, lent;
  for (size_t i = first; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = IValue(aliases.to_cpu(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(aliases.to_cpu(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
        list.push_back(t ? std::optional<at::Tensor>(aliases.to_cpu(*t)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = IValue(CPU);
    } else if (schema.arguments()[i - first].name() == "generator") {
      owner = value.isGenerator() ? value.toGenerator() : card_generator();
      lent = at::make_generator<at::CPUGeneratorImpl>();
      lent.set_state(owner.get_state());
      value = lent;
    }
  }
  // Dropout takes no generator: the CPU's own has the card's state for as long.
  bool lends_default = aliases.op.find("dropout") != std::string::npos;
  at::Generator of_cpu = at::detail::getDefaultCPUGenerator();
  at::Tensor kept;
  if (lends_default) {
    kept = of_cpu.get_state();
    of_cpu.set_state(card_generator().get_state());
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  if (lends_default) {
    card_generator().set_state(of_cpu.get_state());
    of_cpu.set_state(kept);
  }
  if (lent.defined()) owner.set_state(lent.get_state());

  for (auto& [cpu, card] : std::vector(aliases.pairs)) aliases.to_card(cpu);  // out= that was resized
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = IValue(aliases.to_card(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(aliases.to_card(t));
      value = list;
    }
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

// ---- operators that make or move tensors ---------------------------------------------------------------------

static at::Tensor empty(SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                        std::optional<Device>, std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &card_allocator, DispatchKeySet(DispatchKey::CUDA),
                                   dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                                std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &card_allocator, DispatchKeySet(DispatchKey::CUDA),
                                           dtype_or_default(dtype));
}

static at::Tensor view(const at::Tensor& t, IntArrayRef size) { return at::native::view(t, size); }

static std::atomic<int> sync_debug_mode{0};

extern "C" void card_set_sync_debug_mode(int mode) { sync_debug_mode = mode; }  // torch.cuda.set_sync_debug_mode

// Says that the host would wait for a card here, as torch does.
static void wait() {
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation (pretended card)");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (pretended card)");
}

static at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (!non_blocking && to.is_cuda() != from.is_cuda()) wait();
  at::NoGradGuard no_grad;
  auto target = on_cpu(to);
  at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(on_cpu(from));
  return to;
}

static at::Scalar item(const at::Tensor& t) {
  wait();
  return on_cpu(t).item();
}

static const at::Tensor& resize_(const at::Tensor& t, IntArrayRef size, std::optional<MemoryFormat>) {
  size_t bytes = (multiply_integers(size) + t.storage_offset()) * t.itemsize();
  auto storage = t.storage();
  if (storage.nbytes() < bytes) {
    auto data = card_allocator.allocate(bytes);
    if (storage.nbytes()) memcpy(data.mutable_get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

static at::Tensor& set_storage(at::Tensor& t, Storage storage) {
  int64_t n = storage.nbytes() / t.itemsize();
  return at::native::set_storage_cpu_(t, storage, 0, {n}, {1});
}

// A sum in another dtype than the factors', which the CPU has not.
static at::Tensor& addmm_dtype(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, ScalarType dtype,
                               const at::Scalar& beta, const at::Scalar& alpha, at::Tensor& out) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type() && out.scalar_type() == dtype);
  at::NoGradGuard no_grad;
  on_cpu(out).copy_(at::addmm(on_cpu(sum).to(dtype), on_cpu(a).to(dtype), on_cpu(b).to(dtype), beta, alpha));
  return out;
}

// Of float16 read as float32, which the CPU has not.
static at::Tensor log_softmax(const at::Tensor& t, int64_t dim, bool half_to_float) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  auto out = at::empty_like(t, half_to_float ? at::kFloat : t.scalar_type());
  auto result = on_cpu(out);
  at::_log_softmax_out(result, half_to_float ? on_cpu(t).to(at::kFloat) : on_cpu(t), dim, false);
  return out;
}

static void record_stream(at::Tensor&, Stream) {}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("addmm.dtype_out", addmm_dtype);
  m.impl("_log_softmax", log_softmax);
  m.impl("record_stream", record_stream);
}
