// Text of messages and names.
#pragma once

#include <locale>
#include <new>
#include <sstream>
#include <string>
#include <string_view>

namespace h2o {

// Concatenates its arguments: concat("[attend] ", n, " rows, at most ", limit).
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // not the application's locale, which may group digits
  (out << ... << parts);
  if (!out) throw std::bad_alloc();  // the stream swallows the exception
  return out.str();
}

// A name from a file, shortened and safe to print whatever its bytes: 'name'.
inline std::string quoted(std::string_view name) {
  constexpr size_t kMax = 80;
  std::string out = "'";
  for (char c : name.substr(0, kMax)) out += c >= 0x20 && c < 0x7f ? c : '?';
  return out + (name.size() > kMax ? "...'" : "'");
}

}  // namespace h2o
