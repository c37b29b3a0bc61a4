// What the CPU build of torch lacks before it accepts tensors that say cuda:0: a device guard, hooks and pinned memory.
// Nothing here computes. `device.py` does that, on the CPU.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <mutex>
#include <unordered_set>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

// One device with one stream. Work is done when it is queued, so no event is ever pending.
struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard);

// Ordinary memory that remembers that it was asked for as pinned, so that `is_pinned` tells it from pageable memory.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    const std::lock_guard<std::mutex> lock(mutex());
    pinned().insert(data);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  static bool has(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex());
    return pinned().count(data) > 0;
  }

 private:
  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      pinned().erase(data);
    }
    c10::free_cpu(data);
  }
  // Never destroyed: tensors may outlive the statics of this library.
  static std::unordered_set<const void*>& pinned() {
    static auto* pointers = new std::unordered_set<const void*>();
    return *pointers;
  }
  static std::mutex& mutex() {
    static auto* lock = new std::mutex();
    return *lock;
  }
};

}  // namespace

namespace at {

// Answers to what ATen asks of a CUDA runtime. It looks for a class of this name. Random numbers are the CPU's.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::has(data); }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
