// The part of the simulated accelerator that torch calls from C++: memory, streams, events and generators; the process
// group is in process_group.h. Nothing here runs an operator. Allocations, frees, events and waits are appended to a log in
// the order in which the host made them, and the Python scheduler reads the log before it queues anything. So no
// destructor and no stream guard needs the interpreter; only a call that blocks the host enters Python.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <cstdlib>
#include <cstring>
#include <set>

namespace {
using namespace c10;
using at::Tensor;
using Tensors = std::vector<Tensor>;
constexpr auto kSim = DeviceType::PrivateUse1;
constexpr int kDevices = 4, kStreamBits = 20, kPool = 32;

struct Block { size_t size; int64_t stream; std::set<int64_t> used; };
struct EventState { int64_t recorded = 0, done = 0; };
enum Kind : int64_t { ALLOCATED, FREED, USED_BY, FREED_LATER, RECORDED, WAITED, OBSERVED, MOVED };
using Entry = std::array<int64_t, 4>;

struct State {  // leaked, because tensors are freed after static destructors have run
  std::mutex lock;
  std::unordered_map<void*, Block> live;
  std::map<std::pair<int64_t, size_t>, std::vector<void*>> cached;
  std::map<const void*, size_t> pinned;
  std::unordered_map<int64_t, EventState> events;
  std::vector<Entry> log;
  int64_t next_stream = 1 + kPool, next_pool = 0, next_event = 1;
  int64_t allocated = 0, active = 0, peak_allocated = 0, peak_active = 0;
  py::object* synchronize = nullptr;
  std::vector<at::Generator> generators;
};
State& state = *new State;
thread_local DeviceIndex current_device = 0;
thread_local std::array<int64_t, kDevices> current_stream{};

int64_t key(const Stream& s) { return (int64_t(s.device_index()) << kStreamBits) | s.id(); }
Stream stream_of(int64_t key) {
  return Stream(Stream::UNSAFE, Device(kSim, DeviceIndex(key >> kStreamBits)), key & ((1 << kStreamBits) - 1));
}
int64_t address(const void* p) { return reinterpret_cast<int64_t>(p); }

void free_block(void* ptr) {
  std::lock_guard<std::mutex> guard(state.lock);
  auto& block = state.live.at(ptr);
  state.allocated -= block.size;
  for (auto used : block.used) state.log.push_back({USED_BY, address(ptr), used, 0});
  bool now = block.used.empty();
  state.log.push_back({now ? FREED : FREED_LATER, address(ptr), int64_t(block.size), block.stream});
  if (!now) return;
  state.active -= block.size;
  state.cached[{block.stream, block.size}].push_back(ptr);
  state.live.erase(ptr);
}
void release_block(int64_t ptr) {  // the streams that a freed block was recorded on have finished with it
  std::lock_guard<std::mutex> guard(state.lock);
  auto& block = state.live.at(reinterpret_cast<void*>(ptr));
  state.active -= block.size;
  state.cached[{block.stream, block.size}].push_back(reinterpret_cast<void*>(ptr));
  state.live.erase(reinterpret_cast<void*>(ptr));
}

struct SimAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    Device device(kSim, current_device);
    if (n == 0) return DataPtr(nullptr, nullptr, &free_block, device);
    size_t size = (n + 511) / 512 * 512;
    int64_t stream = (int64_t(current_device) << kStreamBits) | current_stream[current_device];
    std::lock_guard<std::mutex> guard(state.lock);
    auto& free = state.cached[{stream, size}];
    void* ptr;
    if (free.empty()) {
      ptr = std::aligned_alloc(512, size);
      std::memset(ptr, 0xFF, size);
    } else {
      ptr = free.back();
      free.pop_back();
    }
    state.live[ptr] = Block{size, stream, {}};
    state.allocated += size, state.active += size;
    state.peak_allocated = std::max(state.peak_allocated, state.allocated);
    state.peak_active = std::max(state.peak_active, state.active);
    state.log.push_back({ALLOCATED, address(ptr), int64_t(n), stream});
    return DataPtr(ptr, ptr, &free_block, device);
  }
  DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
struct PinnedAllocator final : Allocator {
  static void release(void* ptr) {
    std::lock_guard<std::mutex> guard(state.lock);
    state.pinned.erase(ptr);
    std::free(ptr);
  }
  DataPtr allocate(size_t n) override {
    size_t size = std::max<size_t>(64, (n + 63) / 64 * 64);
    void* ptr = std::aligned_alloc(64, size);
    std::memset(ptr, 0xFF, size);
    std::lock_guard<std::mutex> guard(state.lock);
    state.pinned[ptr] = size;
    return DataPtr(ptr, ptr, &release, Device(DeviceType::CPU));
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
SimAllocator& device_memory = *new SimAllocator;
PinnedAllocator& pinned_memory = *new PinnedAllocator;

void synchronize(const char* kind, int64_t which) {
  py::gil_scoped_acquire gil;
  (*state.synchronize)(kind, which);
}
void use_on_stream(const void* ptr, const Stream& stream) {
  std::lock_guard<std::mutex> guard(state.lock);
  auto found = state.live.find(const_cast<void*>(ptr));
  if (found != state.live.end() && found->second.stream != key(stream)) found->second.used.insert(key(stream));
}

struct SimGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override { Device old(kSim, current_device); setDevice(d); return old; }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device d) const override { if (d.index() >= 0) current_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { setDevice(d); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static Device full(Device d) { return Device(kSim, d.index() < 0 ? current_device : d.index()); }
  Stream getStream(Device d) const override {
    d = full(d);
    return Stream(Stream::UNSAFE, d, current_stream[d.index()]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, full(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override {
    std::lock_guard<std::mutex> guard(state.lock);
    return Stream(Stream::UNSAFE, full(d), 1 + state.next_pool++ % kPool);
  }
  Stream getNewStream(Device d, int) const override {
    std::lock_guard<std::mutex> guard(state.lock);
    return Stream(Stream::UNSAFE, full(d), state.next_stream++);
  }
  Stream exchangeStream(Stream s) const override {
    Stream old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    std::lock_guard<std::mutex> guard(state.lock);
    if (!*event) *event = reinterpret_cast<void*>(state.next_event++);
    auto& known = state.events[address(*event)];
    state.log.push_back({RECORDED, address(*event), ++known.recorded, key(s)});
  }
  void block(void* event, const Stream& s) const override {
    std::lock_guard<std::mutex> guard(state.lock);
    if (event) state.log.push_back({WAITED, address(event), state.events[address(event)].recorded, key(s)});
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::mutex> guard(state.lock);
    if (!event) return true;
    auto& known = state.events[address(event)];
    if (known.done < known.recorded) return false;
    state.log.push_back({OBSERVED, address(event), known.recorded, 0});
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    std::lock_guard<std::mutex> guard(state.lock);
    state.events.erase(address(event));
  }
  bool queryStream(const Stream& s) const override {
    py::gil_scoped_acquire gil;
    return (*state.synchronize)("query", key(s)).cast<bool>();
  }
  void synchronizeStream(const Stream& s) const override { synchronize("stream", key(s)); }
  void synchronizeDevice(const DeviceIndex d) const override { synchronize("device", d); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize("event", address(event));
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& s) const override { use_on_stream(data.get(), s); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

struct SimGenerator final : at::CPUGeneratorImpl {  // it gives each operator a seed
  explicit SimGenerator(DeviceIndex index) { device_ = Device(kSim, index); key_set_ = DispatchKeySet(DispatchKey::PrivateUse1); }
};
void resize_storage(const Storage& storage, size_t bytes) {
  DataPtr data = device_memory.allocate(bytes);
  int64_t kept = std::min(bytes, storage.nbytes());
  if (kept) {
    std::lock_guard<std::mutex> guard(state.lock);
    state.log.push_back({MOVED, address(data.get()), address(storage.data()), kept});
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}
struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return maybeExchangeDevice(d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { auto old = current_device; if (d >= 0) current_device = d; return old; }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return state.generators.at(d < 0 ? current_device : d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<SimGenerator>(d < 0 ? current_device : d); }
  at::Device getDeviceFromPtr(void*) const override { return Device(kSim, current_device); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(state.lock);
    auto after = state.pinned.upper_bound(data);
    if (after == state.pinned.begin()) return false;
    auto range = std::prev(after);
    return address(data) < address(range->first) + int64_t(range->second);
  }
};

Device device_or_current(std::optional<Device> d) { return d && d->index() >= 0 ? *d : Device(kSim, current_device); }
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory, DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype));
}
const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t bytes = (self.numel() + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}
Tensor& set_storage(Tensor& self, Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}
Tensor& set_whole_storage(Tensor& self, Storage source) {
  int64_t n = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {n}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
void record_stream(Tensor& self, Stream stream) { use_on_stream(self.storage().data(), stream); }
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // the mathematical form, out of ordinary operators
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the common ones: each takes the compiler a while
  LOWER(conv1d) LOWER(conv2d) LOWER(conv3d) LOWER(linear) LOWER(matmul) LOWER(mm) LOWER(bmm) LOWER(addmm) LOWER(baddbmm)
  LOWER(scaled_dot_product_attention)
  FULL(layer_norm) FULL(cross_entropy_loss) FULL(mse_loss) FULL(nll_loss)
  FULL(softmax, int) FULL(log_softmax, int)
}
}  // namespace
#include "process_group.h"
namespace at::native { REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice) }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  SetAllocator(kSim, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new SimHooks);
  for (int i = 0; i < kDevices; ++i) state.generators.push_back(at::make_generator<SimGenerator>(i));
  py::class_<Kept, std::shared_ptr<Kept>>(m, "Kept").def("drop", &Kept::drop);
  py::class_<SimBackend, intrusive_ptr<SimBackend>, c10d::Backend>(m, "Backend")
      .def(py::init<int, int, py::object, std::chrono::milliseconds>())
      .def_property_readonly("options", &SimBackend::getBackendOptions);
  m.def("keep", [](Tensors tensors) {
    auto kept = std::make_shared<Kept>();
    kept->tensors = std::move(tensors);
    return kept;
  });
  m.def("on_synchronize", [](py::object f) { state.synchronize = new py::object(std::move(f)); });
  m.def("take_log", [] {
    std::lock_guard<std::mutex> guard(state.lock);
    std::vector<Entry> taken;
    taken.swap(state.log);
    return taken;
  });
  m.def("event_done", [](int64_t event, int64_t version) {
    std::lock_guard<std::mutex> guard(state.lock);
    auto found = state.events.find(event);
    if (found != state.events.end()) found->second.done = std::max(found->second.done, version);
  });
  m.def("release", &release_block);
  m.def("alias", [](const Tensor& t) {
    InferenceMode normal(false);
    return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
  });
  m.def("current_stream", [] { return (int64_t(current_device) << kStreamBits) | current_stream[current_device]; });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int d) { current_device = DeviceIndex(d); });
  m.def("new_stream", [] { return key(SimGuard().getNewStream(Device(kSim, current_device), 0)); });
  m.def("poison", [](int64_t ptr, int64_t n) { std::memset(reinterpret_cast<void*>(ptr), 0xFF, n); });
  m.def("move", [](int64_t to, int64_t from, int64_t n) {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), n);
  });
  m.def("default_generator", [](int d) { return state.generators.at(d); });
  m.def("draw", [](at::Generator g) {
    std::lock_guard<std::mutex> guard(g.mutex());
    return int64_t(static_cast<at::CPUGeneratorImpl*>(g.unsafeGetGeneratorImpl())->random64() >> 1);
  });
  m.def("memory", [] {
    std::lock_guard<std::mutex> guard(state.lock);
    return std::array<int64_t, 4>{state.allocated, state.peak_allocated, state.active, state.peak_active};
  });
  m.def("reset_peak", [] {
    std::lock_guard<std::mutex> guard(state.lock);
    state.peak_allocated = state.allocated, state.peak_active = state.active;
  });
}
