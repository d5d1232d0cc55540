class Libh2o < Formula
  desc "Language models from GGUF files with a KV cache of fixed size"
  homepage "$url"
  url "$url/h2o_cpp-$version.tar.gz"
  sha256 "$sdist"
  license "MIT"

  depends_on "cmake" => [:build, :test]

  def install
    system "cmake", "-S", ".", "-B", "build", *std_cmake_args
    system "cmake", "--build", "build"
    system "cmake", "--install", "build"
    pkgshare.install "examples/cpp", "models/tiny-opt.gguf"
  end

  test do
    system "cmake", "-S", pkgshare/"cpp", "-B", "build", "-DCMAKE_PREFIX_PATH=#{opt_prefix}"
    system "cmake", "--build", "build"
    text = shell_output("build/stream_text #{pkgshare}/tiny-opt.gguf 'The old man' 0.2 10")
    assert_match(/\AThe old man./, text)
  end
end
