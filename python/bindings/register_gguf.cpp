// GGUF files for Python: metadata as a dict, tensors as a list, and the raw bytes of both.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstring>

#include "io/gguf_shards.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

// Reads scalars and strings in sequence from the bytes of a value.
class Decoder {
 public:
  explicit Decoder(std::span<const std::byte> bytes) : next_(bytes.data()) {}

  py::object read(GgufType type) {
    switch (type) {
      case GgufType::u8:
        return number<py::int_, uint8_t>();
      case GgufType::i8:
        return number<py::int_, int8_t>();
      case GgufType::u16:
        return number<py::int_, uint16_t>();
      case GgufType::i16:
        return number<py::int_, int16_t>();
      case GgufType::u32:
        return number<py::int_, uint32_t>();
      case GgufType::i32:
        return number<py::int_, int32_t>();
      case GgufType::f32:
        return number<py::float_, float>();
      case GgufType::boolean:
        return py::bool_(take<uint8_t>() != 0);
      case GgufType::u64:
        return number<py::int_, uint64_t>();
      case GgufType::i64:
        return number<py::int_, int64_t>();
      case GgufType::f64:
        return number<py::float_, double>();
      case GgufType::string:
        return string();
      case GgufType::array: {
        const auto element = static_cast<GgufType>(take<uint32_t>());
        return array(element, take<uint64_t>());
      }
    }
    return py::none();
  }

  py::list array(GgufType element, uint64_t count) {
    py::list list(count);
    for (uint64_t i = 0; i < count; ++i) list[i] = read(element);
    return list;
  }

 private:
  template <class T>
  T take() {
    T value;
    std::memcpy(&value, next_, sizeof(T));
    next_ += sizeof(T);
    return value;
  }

  template <class Python, class T>
  py::object number() {
    return Python(take<T>());
  }

  py::object string() {
    const auto size = take<uint64_t>();
    const char* data = reinterpret_cast<const char*>(next_);
    next_ += size;
    return decoded({data, size});
  }

  const std::byte* next_;
};

py::dict metadata(const GgufFile& file) {
  py::dict dict;
  for (const auto& [key, value] : file.metadata()) {
    Decoder decoder(value.bytes);
    dict[decoded(key)] = value.type == GgufType::array
                             ? decoder.array(value.element_type, value.count)
                             : decoder.read(value.type);
  }
  return dict;
}

// (name, type, shape with the slowest dimension first as in numpy, bytes)
py::list tensors(const GgufFile& file) {
  py::list list;
  for (const GgufTensor& t : file.tensors()) {
    py::list shape;
    for (int i = t.n_dims - 1; i >= 0; --i) shape.append(t.dims[i]);
    list.append(
        py::make_tuple(decoded(t.name), find_dtype(t.type)->name, py::tuple(shape), t.data.size()));
  }
  return list;
}

// (key, raw bytes of the entry: key, type and value)
py::list metadata_entries(const GgufFile& file) {
  py::list list;
  for (const auto& [key, value] : file.metadata()) {
    std::string entry;
    const auto append = [&entry](const auto number) {
      entry.append(reinterpret_cast<const char*>(&number), sizeof number);
    };
    append(uint64_t{key.size()});
    entry += key;
    append(value.type);
    if (value.type == GgufType::array) {
      append(value.element_type);
      append(value.count);
    }
    entry.append(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
    list.append(py::make_tuple(decoded(key), py::bytes(entry)));
  }
  return list;
}

// A view of the mapping; keeps the mapping open.
py::array_t<uint8_t> tensor_data(const py::object& self, size_t index) {
  const auto data = self.cast<const GgufFile&>().tensors().at(index).data;
  py::array_t<uint8_t> view(static_cast<py::ssize_t>(data.size()),
                            reinterpret_cast<const uint8_t*>(data.data()), self);
  view.attr("setflags")(py::arg("write") = false);
  return view;
}

// Decodes as Python decodes the names of files, whose bytes may be no UTF-8.
py::object path(const GgufFile& file) {
  const std::string& path = file.path();
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

}  // namespace

void register_gguf(py::module_& m) {
  py::class_<GgufFile, std::shared_ptr<GgufFile>>(m, "GgufFile", "A validated GGUF file.")
      .def(py::init<const std::filesystem::path&>(), py::arg("path"))
      .def_property_readonly("path", &path)
      .def_property_readonly("version", &GgufFile::version)
      .def("metadata", &metadata)
      .def("metadata_entries", &metadata_entries)
      .def("tensors", &tensors)
      .def("tensor_data", &tensor_data, py::arg("index"));

  py::class_<GgufShards>(m, "GgufShards", "A model in one GGUF file or in several that were split.")
      .def(py::init<const std::filesystem::path&>(), py::arg("path"))
      .def_property_readonly("files", [](py::object self) {
        py::list files;
        for (const GgufFile& file : self.cast<const GgufShards&>().files()) {
          files.append(py::cast(file, py::return_value_policy::reference_internal, self));
        }
        return files;
      });
}

}  // namespace h2o::python
