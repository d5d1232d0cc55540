//! Links the shared library, in $H2O_LIB_DIR or where pkg-config finds it.
use std::{env, process::Command};

fn main() {
    println!("cargo:rerun-if-env-changed=H2O_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let directory = env::var("H2O_LIB_DIR").unwrap_or_else(|_| {
        let output = Command::new("pkg-config").args(["--variable=libdir", "h2o"]).output();
        match output {
            Ok(found) if found.status.success() => {
                String::from_utf8_lossy(&found.stdout).trim().to_owned()
            }
            _ => panic!("libh2o not found: set H2O_LIB_DIR, or PKG_CONFIG_PATH to its h2o.pc"),
        }
    });
    println!("cargo:rustc-link-search=native={directory}");
    println!("cargo:rustc-link-lib=dylib=h2o");
    if env::var("CARGO_CFG_UNIX").is_ok() {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{directory}"); // for the tests and examples
    }
}
