#include "cublas.h"

#include <algorithm>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "../error.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace upfold::cuda {
namespace {

#ifdef _WIN32
constexpr const char* kNames[] = {"cublas64_13.dll", "cublas64_12.dll", "cublas64_11.dll"};
constexpr const char* kLtNames[] = {"cublasLt64_13.dll", "cublasLt64_12.dll", "cublasLt64_11.dll"};

void* open_loaded(const char* name) { return reinterpret_cast<void*>(GetModuleHandleA(name)); }
void* open_by_name(const char* name) { return reinterpret_cast<void*>(LoadLibraryA(name)); }
void* symbol_of(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name));
}
std::string path_of(void* library, void*) {
  char path[MAX_PATH] = "";
  const DWORD size = GetModuleFileNameA(reinterpret_cast<HMODULE>(library), path, MAX_PATH);
  return std::string(path, size);
}
#else
constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"};

#ifdef RTLD_NOLOAD
void* open_loaded(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }
#else
void* open_loaded(const char*) { return nullptr; }
#endif
void* open_by_name(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_LOCAL); }
void* symbol_of(void* library, const char* name) { return dlsym(library, name); }
std::string path_of(void*, void* symbol) {
  Dl_info where{};
  return dladdr(symbol, &where) != 0 && where.dli_fname != nullptr ? where.dli_fname : "";
}
#endif

// cublasGetProperty(libraryPropertyType, int*): needs no handle, hence no GPU; 0, 1, 2 = major, minor, patch.
using GetProperty = int (*)(int, int*);

void* g_library = nullptr;  // what find_cublas() found, under its lock

CublasFound describe(void* library, const char* name) {
  void* symbol = symbol_of(library, "cublasGetProperty");
  if (symbol == nullptr) return {"", "", concat(name, " has no cublasGetProperty")};
  int version[3] = {0, 0, 0};
  for (int part = 0; part < 3; ++part) {
    const int status = reinterpret_cast<GetProperty>(symbol)(part, &version[part]);
    if (status != 0) return {"", "", concat(name, ": cublasGetProperty answered ", status)};
  }
  g_library = library;
  return {path_of(library, symbol), concat(version[0], ".", version[1], ".", version[2]), ""};
}

CublasFound search() {
  for (const char* name : kNames) {
    if (void* library = open_loaded(name)) return describe(library, name);
  }
  for (const char* name : kNames) {
    if (void* library = open_by_name(name)) return describe(library, name);
  }
  return {"", "", concat("neither torch nor the loader has ", kNames[0], ", ", kNames[1], " or ", kNames[2])};
}

template <typename Function>
void take_function(const char* name, Function& function) {
  void* symbol = symbol_of(g_library, name);
  if (symbol == nullptr) throw std::runtime_error(concat("cuBLAS has no ", name));
  function = reinterpret_cast<Function>(symbol);
}

Cublas load() {
  const CublasFound found = find_cublas();
  if (found.version.empty()) throw std::runtime_error(concat("no cuBLAS was found: ", found.reason));
  Cublas table{};
  take_function("cublasCreate_v2", table.create);
  take_function("cublasSetStream_v2", table.set_stream);
  take_function("cublasSetWorkspace_v2", table.set_workspace);
  take_function("cublasSetMathMode", table.set_math_mode);
  take_function("cublasGemmStridedBatchedEx", table.gemm_strided_batched_ex);
  return table;
}

// cublasLt is loaded with cuBLAS, which needs it; dlsym looks into what a library needs too.
void* lt_library(const std::string& version) {
#ifdef _WIN32
  for (const char* name : kLtNames) {
    if (std::string(name).find("_" + version.substr(0, version.find('.')) + ".") != std::string::npos) return open_loaded(name);
  }
  return nullptr;
#else
  return version.empty() ? nullptr : g_library;
#endif
}

struct FoundLt {
  CublasLt table;
  bool whole;
};

FoundLt load_lt() {
  FoundLt found{{}, true};
  void* const library = lt_library(find_cublas().version);
  const auto take = [&](const char* name, auto& function) {
    void* const symbol = library == nullptr ? nullptr : symbol_of(library, name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    found.whole = found.whole && symbol != nullptr;
  };
  take("cublasLtMatmulDescCreate", found.table.create_product);
  take("cublasLtMatmulDescSetAttribute", found.table.set_product);
  take("cublasLtMatmulDescDestroy", found.table.destroy_product);
  take("cublasLtMatrixLayoutCreate", found.table.create_layout);
  take("cublasLtMatrixLayoutSetAttribute", found.table.set_layout);
  take("cublasLtMatrixLayoutDestroy", found.table.destroy_layout);
  take("cublasLtMatmulPreferenceCreate", found.table.create_preference);
  take("cublasLtMatmulPreferenceSetAttribute", found.table.set_preference);
  take("cublasLtMatmulPreferenceDestroy", found.table.destroy_preference);
  take("cublasLtMatmulAlgoGetHeuristic", found.table.heuristic);
  take("cublasLtMatmul", found.table.matmul);
  return found;
}

constexpr int kExactReduction = 16;  // default mathematics, partial sums of 16-bit products kept in float32

void check_status(int status, const char* what) {
  if (status != 0) throw std::runtime_error(concat(what, " failed: cuBLAS status ", status));
}

// Handles that no thread holds. Never destroyed: at exit the library may be gone before its handles.
struct HandlePool {
  std::mutex mutex;
  std::vector<std::pair<int, void*>> free;
};
HandlePool& handle_pool() {
  static HandlePool* const pool = new HandlePool;
  return *pool;
}

// The handles of one thread, a device each; given back when the thread ends.
struct ThreadHandles {
  std::vector<std::pair<int, void*>> held;
  ~ThreadHandles() {
    HandlePool& pool = handle_pool();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    pool.free.insert(pool.free.end(), held.begin(), held.end());
  }
};

}  // namespace

const Cublas& cublas() {
  static const Cublas table = load();  // a failure is tried again at the next call
  return table;
}

const CublasLt* cublas_lt() {
  if (find_cublas().version.empty()) return nullptr;
  static const FoundLt found = load_lt();
  return found.whole ? &found.table : nullptr;
}

CublasFound find_cublas() {
  // A miss is asked again: torch may load its cuBLAS later.
  static std::mutex mutex;
  static CublasFound found;
  const std::lock_guard<std::mutex> lock(mutex);
  if (found.version.empty()) found = search();
  return found;
}

void* cublas_handle(int device) {
  static thread_local ThreadHandles mine;
  const auto of_device = [device](const std::pair<int, void*>& entry) { return entry.first == device; };
  const auto known = std::find_if(mine.held.begin(), mine.held.end(), of_device);
  if (known != mine.held.end()) return known->second;
  HandlePool& pool = handle_pool();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  const auto spare = std::find_if(pool.free.begin(), pool.free.end(), of_device);
  void* handle = nullptr;
  if (spare != pool.free.end()) {
    handle = spare->second;
    pool.free.erase(spare);
  } else {
    check_status(cublas().create(&handle), "cublasCreate");
    check_status(cublas().set_math_mode(handle, kExactReduction), "cublasSetMathMode");
  }
  mine.held.emplace_back(device, handle);
  return handle;
}

}  // namespace upfold::cuda
