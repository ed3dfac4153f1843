#include "head.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace kbt::python {

namespace {

Memory aligned_memory(std::size_t bytes) {
  return Memory(::operator new (bytes, std::align_val_t{KBT_ARENA_ALIGN}));
}

template <std::size_t N, class T>
std::vector<T> to_vector(const T (&values)[N], int used) {
  return std::vector<T>(values, values + used);
}

}  // namespace

Mailbox::Mailbox(const kbt_head *head) : memory_(aligned_memory(kbt_mailbox_bytes(head))) {
  kbt_mailbox_init(head, memory_.get(), kbt_mailbox_bytes(head), &mailbox_);
}

Core::Core(const kbt_config &cfg) {
  const std::size_t bytes = kbt_arena_bytes(&cfg);
  if (bytes == 0) throw py::value_error("the configuration is invalid; Config.check says why");
  arena_ = aligned_memory(bytes);
  bytes_ = bytes;
  const kbt_status status = kbt_init(&cfg, arena_.get(), bytes, &head_);
  if (status != KBT_OK) throw py::value_error(kbt_status_str(status));
  kbt_get_config(head_, &cfg_);
  dtype_ = cfg_.dtype == KBT_FLOAT64 ? py::dtype::of<double>() : py::dtype::of<float>();
  d_ = cfg_.widths[0];
  outputs_ = cfg_.widths[cfg_.layers];
}

py::object Core::predicted_cov() {
  const py::ssize_t K = static_cast<py::ssize_t>(kbt_predicted_rows(head())) * outputs_;
  py::array cov = new_array(dtype_, K, K);
  const kbt_status status = kbt_predicted(head(), nullptr, cov.mutable_data());
  if (status != KBT_OK) return py::int_(static_cast<int>(status));
  return std::move(cov);
}

int Core::set_prior(const py::array &weight, const py::array &bias, std::uint64_t seed) {
  return kbt_set_prior(head(), weight.data(), bias.data(), seed);
}

int Core::set_means(const std::vector<py::array> &means) {
  std::array<const void *, KBT_MAX_LAYERS> pointers{};
  for (std::size_t i = 0; i < means.size() && i < pointers.size(); ++i) pointers[i] = means[i].data();
  return kbt_set_means(head(), pointers.data());
}

int Core::set_noise(const py::array &noise) {
  const kbt_status status = kbt_set_noise(head(), noise.data(), static_cast<int32_t>(noise.size()));
  post();
  return status;
}

py::array Core::noise() const {
  const bool matrix = cfg_.noise == KBT_NOISE_MATRIX || cfg_.noise == KBT_NOISE_FULL;
  py::array all(dtype_, std::vector<py::ssize_t>{outputs_, matrix ? outputs_ : 1});
  int32_t count = 0;
  kbt_get_noise(head(), all.mutable_data(), &count);
  if (count == outputs_ * outputs_ && outputs_ > 1) return all;
  return py::array(dtype_, std::vector<py::ssize_t>{outputs_}, all.data());
}

py::array Core::mean(int layer) const {
  const py::ssize_t n = width(layer + 1), m = width(layer) + 1;
  py::array out(dtype_, std::vector<py::ssize_t>{n, m});
  kbt_get_mean(head(), layer, out.mutable_data());
  return out;
}

py::array Core::cov(int layer) const {
  const py::ssize_t n = width(layer + 1), m = width(layer) + 1;
  std::vector<py::ssize_t> shape{n, m, m};
  if (cfg_.covariance == KBT_FULL) shape = {n * m, n * m};
  if (cfg_.covariance == KBT_DIAGONAL) shape = {n, m};
  py::array out(dtype_, shape);
  kbt_get_cov(head(), layer, out.mutable_data());
  return out;
}

py::tuple Core::counters() const {
  kbt_counters c{};
  kbt_get_counters(head(), &c);
  return py::make_tuple(c.rejected, c.gated, c.floored);
}

py::tuple Core::health() const {
  kbt_health h{};
  kbt_get_health(head(), &h);
  return py::make_tuple(static_cast<int>(h.verdict), h.seen, h.average, h.low, h.high, h.gated, h.smallest_var,
                        h.largest_var);
}

py::tuple Core::belief() const {
  kbt_belief belief{};
  kbt_get_belief(head(), &belief);
  py::tuple weights(KBT_MEMBERS);
  for (std::size_t i = 0; i < KBT_MEMBERS; ++i) weights[i] = belief.weight[i];
  return weights;
}

py::list Core::changes() const {
  kbt_change changes[KBT_MOST_CHANGES];
  int32_t count = 0;
  kbt_get_changes(head(), changes, KBT_MOST_CHANGES, &count);
  py::list all;
  for (int32_t i = 0; i < count; ++i) {
    all.append(py::make_tuple(changes[i].sample, changes[i].noticed, changes[i].evidence, changes[i].kind));
  }
  return all;
}

int Core::reset() {
  const kbt_status status = kbt_reset(head());
  post();
  return status;
}

int Core::suppose_changed() {
  const kbt_status status = kbt_suppose_changed(head());
  post();
  return status;
}

bool Core::record_flight(std::uint32_t samples) {
  const std::size_t bytes = kbt_flight_bytes(&cfg_, samples);
  if (bytes == 0) return false;
  Memory memory = aligned_memory(bytes);
  if (kbt_flight_init(head(), memory.get(), bytes, samples, &flight_) != KBT_OK) return false;
  flight_memory_ = std::move(memory);
  return true;
}

void Core::stop_flight() {
  kbt_flight_stop(head());
  flight_ = nullptr;
  flight_memory_.reset();
}

py::object Core::flight_log() const {
  head();
  if (flight_ == nullptr) return py::none();
  std::string log;
  log.reserve(kbt_flight_log_size(flight_));
  kbt_flight_log(
      flight_,
      [](void *to, const void *bytes, std::size_t count) {
        static_cast<std::string *>(to)->append(static_cast<const char *>(bytes), count);
      },
      &log);
  return py::bytes(log);
}

py::object Core::replay(const py::bytes &log) {
  using Steps = std::vector<kbt_flight_step>;
  const std::string_view view = log;
  kbt_flight_info info{};
  kbt_status status = kbt_flight_check(view.data(), view.size(), &info);
  if (status != KBT_OK) return py::int_(static_cast<int>(status));
  const Memory memory = aligned_memory(info.replay_bytes);
  Steps steps;
  steps.reserve(info.records);
  kbt_flight_outcome outcome{};
  status = kbt_flight_replay(
      view.data(), view.size(), head(), memory.get(), info.replay_bytes,
      [](void *to, const kbt_flight_step *step) { static_cast<Steps *>(to)->push_back(*step); }, &steps, &outcome);
  if (status != KBT_OK) return py::int_(static_cast<int>(status));
  py::list rows;
  for (const kbt_flight_step &step : steps) {
    rows.append(py::make_tuple(step.kind, static_cast<int>(step.recorded), static_cast<int>(step.status),
                               step.recorded_samples, step.samples, step.recorded_nis, step.nis, step.same != 0));
  }
  return py::make_tuple(rows, outcome.first_difference, outcome.final_hash, outcome.reproduced != 0);
}

py::bytes Core::save() const {
  std::vector<char> blob(kbt_state_size(head()));
  kbt_state_save(head(), blob.data(), blob.size());
  return py::bytes(blob.data(), blob.size());
}

int Core::load(const py::bytes &blob) {
  const std::string_view view = blob;
  const kbt_status status = kbt_state_load(head(), view.data(), view.size());
  post();
  return status;
}

void Core::post_to(const std::shared_ptr<Mailbox> &mailbox) {
  readers_.erase(std::remove_if(readers_.begin(), readers_.end(), [](const auto &box) { return box.expired(); }),
                 readers_.end());
  readers_.push_back(mailbox);
}

void Core::post() const {
  for (const auto &reader : readers_) {
    if (const auto mailbox = reader.lock()) kbt_post(head_, mailbox->get());
  }
}

void Core::take(const std::shared_ptr<Mailbox> &mailbox) {
  if (kbt_take(head(), mailbox->get()) == KBT_OK && taken_from_ != mailbox) taken_from_ = mailbox;
}

void bind_head(py::module_ &m) {
  m.def("state_config", [](const py::bytes &blob) -> py::object {
    const std::string_view view = blob;
    kbt_config cfg{};
    const kbt_status status = kbt_state_config(view.data(), view.size(), &cfg);
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    return py::cast(cfg);
  });

  m.def("flight_info", [](const py::bytes &log) -> py::object {
    const std::string_view view = log;
    kbt_flight_info info{};
    const kbt_status status = kbt_flight_check(view.data(), view.size(), &info);
    if (status != KBT_OK) return py::int_(static_cast<int>(status));
    return py::make_tuple(info.records, info.before, info.checkpoint, info.final_hash, info.base_offset,
                          info.base_bytes, info.records_offset, info.record_bytes, py::cast(info.cfg));
  });

  py::class_<kbt_config>(m, "Config")
      .def(py::init([](int d, int outputs) {
        kbt_config cfg;
        kbt_config_default(&cfg, d, outputs);
        return cfg;
      }))
      .def_readwrite("dtype", &kbt_config::dtype)
      .def_readonly("layers", &kbt_config::layers)
      .def_property(
          "widths", [](const kbt_config &c) { return to_vector(c.widths, c.layers + 1); },
          [](kbt_config &c, const std::vector<int32_t> &w) {
            if (w.size() < 2 || w.size() > KBT_MAX_LAYERS + 1) throw py::value_error("widths: 2..9 entries");
            c.layers = static_cast<int32_t>(w.size()) - 1;
            std::copy(w.begin(), w.end(), c.widths);
          })
      .def_property(
          "prior_var", [](const kbt_config &c) { return to_vector(c.prior_var, c.layers); },
          [](kbt_config &c, const std::vector<double> &v) {
            if (static_cast<int32_t>(v.size()) != c.layers) throw py::value_error("prior_var: one per layer");
            std::copy(v.begin(), v.end(), c.prior_var);
          })
      .def_readwrite("max_rows", &kbt_config::max_rows)
      .def_readwrite("output", &kbt_config::output)
      .def_readwrite("covariance", &kbt_config::covariance)
      .def_readwrite("rule", &kbt_config::rule)
      .def_readwrite("noise", &kbt_config::noise)
      .def_readwrite("relu_order", &kbt_config::relu_order)
      .def_readwrite("softmax_order", &kbt_config::softmax_order)
      .def_readwrite("noise_var", &kbt_config::noise_var)
      .def_readwrite("input_var", &kbt_config::input_var)
      .def_readwrite("forgetting", &kbt_config::forgetting)
      .def_readwrite("gate", &kbt_config::gate)
      .def_readwrite("drift", &kbt_config::drift)
      .def("check",
           [](const kbt_config &c) {
             const char *field = "";
             const int status = kbt_config_check(&c, &field);
             return py::make_tuple(status, std::string(field));
           })
      .def("arena_bytes", [](const kbt_config &c) { return kbt_arena_bytes(&c); });

  py::class_<Mailbox, std::shared_ptr<Mailbox>>(m, "Mailbox").def(py::init([](const Core &core) {
    return std::make_shared<Mailbox>(core.head());
  }));
  py::class_<Core> core(m, "Core");
  fast<Core, &Core::predict, 1>(core, "predict");
  fast<Core, &Core::learn, 3>(core, "learn");
  core.def(py::init<const kbt_config &>())
      .def("set_prior", &Core::set_prior)
      .def("set_means", &Core::set_means)
      .def("set_noise", &Core::set_noise)
      .def("noise", &Core::noise)
      .def("mean", &Core::mean)
      .def("cov", &Core::cov)
      .def("predicted_cov", &Core::predicted_cov)
      .def("counters", &Core::counters)
      .def("health", &Core::health)
      .def("belief", &Core::belief)
      .def("changes", &Core::changes)
      .def("reset", &Core::reset)
      .def("suppose_changed", &Core::suppose_changed)
      .def("record_flight", &Core::record_flight)
      .def("stop_flight", &Core::stop_flight)
      .def("flight_log", &Core::flight_log)
      .def("replay", &Core::replay)
      .def("save", &Core::save)
      .def("load", &Core::load)
      .def("post_to", &Core::post_to)
      .def("take", &Core::take)
      .def_property_readonly("ticket", &Core::ticket)
      .def_property_readonly("samples", &Core::samples)
      .def_property_readonly("predicted_rows", &Core::predicted_rows)
      .def_property_readonly("one_row", &Core::one_row)
      .def_property_readonly("nbytes", &Core::nbytes)
      .def_property_readonly("config", &Core::config);
}

}  // namespace kbt::python
