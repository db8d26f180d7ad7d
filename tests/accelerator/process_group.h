// The process group backend: each method hands its tensors to Python, which queues the collective on a stream.
#pragma once
namespace {
struct Kept {  // the tensors of a collective, alive until a stream has waited for it or it is done
  std::mutex lock;
  Tensors tensors;
  void drop(std::optional<int64_t> stream) {
    Tensors dropped;
    { std::lock_guard<std::mutex> guard(lock); dropped.swap(tensors); }
    if (stream) for (auto& t : dropped) use_on_stream(t.storage().data(), stream_of(*stream));
  }
};
struct SimWork final : c10d::Work {
  SimWork(Stream stream, std::shared_ptr<Kept> kept, const Tensors& outputs, bool blocks)
      : event(kSim), kept(std::move(kept)), blocks(blocks),
        future(make_intrusive<ivalue::Future>(ListType::ofTensors(), std::vector<Device>{stream.device()})) {
    event.record(stream);
    StreamGuard guard(stream);
    future->markCompleted(IValue(outputs));
  }
  bool isCompleted() override { return event.query(); }
  bool isSuccess() const override { return event.query(); }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    event.block(SimGuard().getStream(event.device()));
    kept->drop(std::nullopt);  // from here on the stream that waited orders every reuse
    if (blocks) event.synchronize();
    return true;
  }
  intrusive_ptr<ivalue::Future> getFuture() override { return future; }
  Tensors result() override { return future->value().toTensorVector(); }
  c10::Event event;
  std::shared_ptr<Kept> kept;
  bool blocks;
  intrusive_ptr<ivalue::Future> future;
};

using WorkPtr = intrusive_ptr<c10d::Work>;
Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}
struct SimBackend final : c10d::Backend {
  SimBackend(int rank, int size, py::object impl, std::chrono::milliseconds timeout)
      : Backend(rank, size), impl(new py::object(std::move(impl))),
        options(make_intrusive<Options>("simccl", timeout)) {}
  ~SimBackend() override { if (Py_IsInitialized()) { py::gil_scoped_acquire gil; delete impl; } }
  template <class... Args>
  WorkPtr issue(const char* name, Tensors outputs, const Tensors& inputs, const Args&... args) {
    auto kept = std::make_shared<Kept>();
    kept->tensors = outputs;
    kept->tensors.insert(kept->tensors.end(), inputs.begin(), inputs.end());
    int64_t stream;
    {
      py::gil_scoped_acquire gil;
      stream = impl->attr(name)(kept, args...).template cast<int64_t>();
    }
    return make_intrusive<SimWork>(stream_of(stream), kept, outputs, std::string(name) == "barrier");
  }
  static int op(const c10d::ReduceOp& o) { return int(o.op_); }
  const std::string getBackendName() const override { return "simccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  intrusive_ptr<Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout; }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { return issue("broadcast", t, {}, t.at(0), o.rootRank); }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override { return issue("allreduce", t, {}, t.at(0), op(o.reduceOp)); }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions&) override {
    return issue("allgather", flat(out), in, out.at(0), in.at(0));
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    return issue("allgather_base", {out}, {in}, out, in);
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    return issue("reduce_scatter", out, flat(in), out.at(0), in.at(0), op(o.reduceOp));
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return issue("reduce_scatter_base", {out}, {in}, out, in, op(o.reduceOp));
  }
  WorkPtr send(Tensors& t, int peer, int) override { return issue("send", {}, t, t.at(0), peer); }
  WorkPtr recv(Tensors& t, int peer, int) override { return issue("recv", t, {}, t.at(0), peer); }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return issue("barrier", {}, {}); }
  py::object* impl;
  intrusive_ptr<Options> options;
};
}  // namespace
