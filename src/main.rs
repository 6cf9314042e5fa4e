//! The `spark-quant` binary: reads the command line, and turns the outcome into an exit code.

use clap::Parser;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = spark_quant::cli::Args::parse();
    match spark_quant::cli::main(&args) {
        Ok(code) => code,
        Err(error) => {
            // Each message has its cause in it, so the chain is left out. A closed stderr leaves nobody to tell.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::from(2)
        }
    }
}
