//! The command line: raw arguments to a resolved request, and outcomes to text or JSON.

use crate::checkpoint::{check_destination, free_bytes, Checkpoint};
use crate::error::{Error, Result};
use crate::kernel::Level;
use crate::plan::{plan, plan_dequantize, Adapter, Plan, Request, Work};
use crate::progress::Progress;
use crate::report::{DenseSummary, Report};
use crate::run::{dequantize, quantize, Settings};
use crate::scheme::{QType, ALL_LAYOUTS};
use crate::signals;
use crate::tensor::Float;
use crate::verify::{verify, Against, Outcome};
use clap::{Parser, ValueEnum};
use serde_json::{json, Value};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Quantize safetensors checkpoints to packed low-bit layouts, and verify what was written.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub struct Args {
    /// Dense checkpoint: a folder in the Hugging Face layout, or one .safetensors file
    #[arg(long, value_name = "IN", required_unless_present = "verify")]
    src: Option<PathBuf>,

    /// Output folder
    #[arg(long, value_name = "OUT", required_unless_present = "dry_run")]
    dst: Option<PathBuf>,

    /// Weights along in_features that share a scale [default: 128 for int4, 64 for uintN]
    #[arg(long, value_name = "N")]
    group: Option<usize>,

    /// Asymmetric grid: a zero point per group
    #[arg(long)]
    asym: bool,

    /// Quantize lm_head too; a head tied to the embedding becomes a quantized copy of it
    #[arg(long)]
    quantize_lm_head: bool,

    /// Quantize the token embedding too (few readers can load one)
    #[arg(long)]
    quantize_embedding: bool,

    /// What the weights become: int4, or uint2 to uint7 [default: int4]
    #[arg(long, value_name = "TYPE", value_parser = parse_qtype)]
    qtype: Option<QType>,

    /// How int4 lies on disk; awq is always asymmetric [default: gptq]
    #[arg(long, value_name = "LAYOUT", value_parser = parse_layout)]
    layout: Option<&'static str>,

    /// Fused q_k_v projections: split them into q, k and v, or keep them whole [default: split]
    #[arg(long, value_name = "HOW", value_enum)]
    fused_qkv: Option<FusedQkv>,

    /// Quantize only modules that match one of these patterns (fnmatch, on names less `.weight`)
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,

    /// Leave modules dense that match one of these patterns
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,

    /// uintN: quantize only the modules that this accuracy-recovery adapter names
    #[arg(long, value_name = "ADAPTER")]
    ara: Option<PathBuf>,

    /// Largest output file [default: 5GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_shard_size: Option<u64>,

    /// Worker threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Read headers alone and print the plan
    #[arg(long)]
    dry_run: bool,

    /// Replace a checkpoint at --dst that this tool wrote
    #[arg(long)]
    overwrite: bool,

    /// Check the checkpoint at --dst; with --src also against the weights it was made from. Never writes
    #[arg(long, conflicts_with_all = ["dry_run", "overwrite", "asym", "quantize_lm_head", "quantize_embedding",
        "group", "qtype", "layout", "fused_qkv", "include", "exclude", "ara", "max_shard_size"])]
    verify: bool,

    /// Decode the packed checkpoint at --src into a dense one at --dst
    #[arg(long, conflicts_with_all = ["verify", "asym", "quantize_lm_head", "quantize_embedding", "group", "qtype",
        "layout", "fused_qkv", "include", "exclude", "ara"])]
    dequantize: bool,

    /// With --dequantize: dtype of the decoded weights, bf16, f16 or f32 [default: what they were]
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    dtype: Option<Float>,

    /// With --verify --src: the SNR that every quantized tensor must reach
    #[arg(long, value_name = "DB", allow_negative_numbers = true, value_parser = parse_db)]
    min_snr: Option<f64>,

    /// Print one JSON document on stdout
    #[arg(long)]
    json: bool,

    /// No progress bar and no summary; warnings and errors still go to stderr
    #[arg(long)]
    quiet: bool,

    /// Instruction set of the kernels, for tests and benches
    #[arg(long, value_name = "LEVEL", hide = true, env = "SPARK_QUANT_LEVEL")]
    level: Option<Level>,

    /// Bytes of packed output held in memory, for tests
    #[arg(long, value_name = "SIZE", hide = true, value_parser = parse_size)]
    budget: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FusedQkv {
    Split,
    Keep,
}

fn parse_qtype(text: &str) -> Result<QType, String> {
    match text {
        "int4" => Ok(QType::Int4),
        "uint2" => Ok(QType::Uint(2)),
        "uint3" => Ok(QType::Uint(3)),
        "uint4" => Ok(QType::Uint(4)),
        "uint5" => Ok(QType::Uint(5)),
        "uint6" => Ok(QType::Uint(6)),
        "uint7" => Ok(QType::Uint(7)),
        "uint8" => {
            let why =
                "torchao 0.10.0 never quantized uint8, it left these layers dense, and so there is nothing to match";
            Err(why.to_string())
        }
        _ => Err("known types: int4, uint2, uint3, uint4, uint5, uint6, uint7".to_string()),
    }
}

fn parse_layout(text: &str) -> Result<&'static str, String> {
    let found = ALL_LAYOUTS.iter().find(|layout| **layout == text);
    found
        .copied()
        .ok_or_else(|| format!("known layouts: {}", ALL_LAYOUTS.join(", ")))
}

fn parse_db(text: &str) -> Result<f64, String> {
    let db: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of dB"))?;
    // A limit that is not a number would never be missed.
    if !db.is_finite() {
        return Err("a limit is a finite number of dB".to_string());
    }
    Ok(db)
}

fn parse_dtype(text: &str) -> Result<Float, String> {
    match text {
        "bf16" | "bfloat16" => Ok(Float::Bf16),
        "f16" | "float16" => Ok(Float::F16),
        "f32" | "float32" => Ok(Float::F32),
        _ => Err("known dtypes: bf16, f16, f32".to_string()),
    }
}

/// Bytes: `5GB` is 5 * 10^9 as in the Hugging Face tools, `5GiB` 5 * 2^30; a plain number counts bytes.
fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KIB" => 1 << 10,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        "TIB" => 1 << 40,
        _ => return Err(format!("{unit:?} is not a unit; try 5GB or 512MiB")),
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("{number:?} is not a number; try 5GB or 512MiB"))?;
    let bytes = number * scale as f64;
    if !(1.0..9e18).contains(&bytes) {
        return Err("a size is at least one byte and below 9 EB".to_string());
    }
    Ok(bytes as u64)
}

/// Does what the arguments ask and prints the outcome.
///
/// # Errors
/// All that is not a verification fault.
pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    signals::listen();
    let output = Output {
        json: args.json,
        quiet: args.quiet,
    };
    args.check_modes()?;
    if args.verify {
        return Ok(run_verify(args, output)?);
    }
    let src = args.src.as_deref().unwrap_or(Path::new(""));
    let source = Checkpoint::open(src)?;
    if let Some(dst) = &args.dst {
        match check_destination(dst, src, args.overwrite) {
            // A dry run writes nothing there; what a real one would say is still worth knowing.
            Err(error) if args.dry_run => warn(&error.to_string()),
            checked => checked?,
        }
    }
    let plan = match args.dequantize {
        true => plan_dequantize(&source, args.dtype, args.max_shard_size())?,
        false => plan(&args.request()?, &source)?,
    };
    plan.warnings.iter().for_each(|warning| warn(warning));
    if args.dry_run {
        output.plan(&plan, args.dst.as_deref())?;
        return Ok(ExitCode::SUCCESS);
    }
    let dst = args.dst.as_deref().unwrap_or(Path::new(""));
    if args.dequantize {
        let progress = Progress::new(dense_bytes(&plan), "decoding", args.quiet);
        let done = dequantize(&plan, &source, dst, &args.settings()?, &progress);
        progress.finish();
        output.summary(&plan, &done?, dst)?;
        return Ok(ExitCode::SUCCESS);
    }
    let progress = Progress::new(plan.source_bytes, "quantizing", args.quiet);
    let done = quantize(&plan, &source, dst, &args.settings()?, &progress);
    progress.finish();
    let report = done?;
    if report.underflowed_groups > 0 {
        warn(&format!(
            "{} group(s) have a scale too small for float16: their weights, which are not 0, decode to 0",
            report.underflowed_groups
        ));
    }
    output.report(&plan, &report, dst)?;
    Ok(ExitCode::SUCCESS)
}

/// Bytes that a dequantizing run counts on its bar: decoded and copied ones.
fn dense_bytes(plan: &Plan) -> u64 {
    plan.tensors.iter().map(|tensor| tensor.len).sum()
}

fn run_verify(args: &Args, output: Output) -> Result<ExitCode> {
    let dst = args.dst.as_deref().unwrap_or(Path::new(""));
    let total = args.src.as_deref().unwrap_or(dst);
    let progress = Progress::new(folder_bytes(total), "verifying", args.quiet);
    let against = Against {
        src: args.src.as_deref(),
        min_snr: args.min_snr,
    };
    let outcome = verify(dst, against, &args.settings()?, &progress);
    progress.finish();
    let outcome = outcome?;
    output.outcome(&outcome, dst)?;
    Ok(ExitCode::from(u8::from(!outcome.findings.is_empty())))
}

/// About what a progress bar has to cover; 0 where it cannot be told.
fn folder_bytes(path: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(path) else {
        return std::fs::metadata(path).map_or(0, |file| file.len());
    };
    let weights = entries
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|end| end == "safetensors"));
    weights
        .filter_map(|entry| std::fs::metadata(entry.path()).ok())
        .map(|file| file.len())
        .sum()
}

fn warn(text: &str) {
    // A closed stderr leaves nobody to tell.
    let _ = writeln!(std::io::stderr(), "warning: {text}");
}

impl Args {
    /// Options that mean something in one mode only.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for one given in another, where it would be silently ignored.
    fn check_modes(&self) -> Result<()> {
        if self.min_snr.is_some() && !(self.verify && self.src.is_some()) {
            let why = "--min-snr is checked by --verify, and needs the source's weights: --verify --src IN --dst OUT";
            return Err(Error::BadRequest(why.to_string()));
        }
        if self.dtype.is_some() && !self.dequantize {
            return Err(Error::BadRequest("--dtype is of --dequantize".to_string()));
        }
        Ok(())
    }

    fn max_shard_size(&self) -> u64 {
        self.max_shard_size.unwrap_or(5_000_000_000)
    }

    fn request(&self) -> Result<Request> {
        Ok(Request {
            qtype: self.qtype.unwrap_or(QType::Int4),
            layout: self.layout,
            group: self.group,
            asym: self.asym,
            quantize_lm_head: self.quantize_lm_head,
            quantize_embedding: self.quantize_embedding,
            keep_fused: self.fused_qkv == Some(FusedQkv::Keep),
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            adapter: self.ara.as_deref().map(Adapter::open).transpose()?,
            max_shard_size: self.max_shard_size(),
        })
    }

    fn settings(&self) -> Result<Settings> {
        let threads = match self.threads {
            Some(threads) => usize::from(threads),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let mut settings = Settings::new(threads);
        settings.overwrite = self.overwrite;
        if let Some(level) = self.level {
            if !Level::available().contains(&level) {
                return Err(Error::BadRequest(format!("this CPU cannot run the {level} kernels")));
            }
            settings.level = level;
        }
        if let Some(budget) = self.budget {
            settings.budget = budget as usize;
        }
        Ok(settings)
    }
}

/// Writes to stdout; a reader that went away is not an error.
#[derive(Clone, Copy)]
struct Output {
    json: bool,
    quiet: bool,
}

impl Output {
    fn print(self, text: &str) -> Result<()> {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(Error::io(Path::new("stdout"), "writing")(error))
            }
            _ => Ok(()),
        }
    }

    fn document(self, value: &impl serde::Serialize) -> Result<()> {
        let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
        text.push('\n');
        self.print(&text)
    }

    fn report(self, plan: &Plan, report: &Report, dst: &Path) -> Result<()> {
        if self.json {
            return self.document(report);
        }
        if self.quiet {
            return Ok(());
        }
        let mut text = format!(
            "{}: {} {}, group {}\n",
            dst.display(),
            report.qtype,
            scheme_text(plan),
            report.group
        );
        text += &format!(
            "  quantized  {} tensors, {:.2} % of the weights, {} bits each\n",
            report.tensors,
            100.0 * report.coverage,
            report.bits_per_weight
        );
        let db = |value: Option<f64>| value.map_or("without loss".to_string(), |db| format!("{db:.2} dB"));
        text += &format!(
            "  SNR        mean {}, least {}\n",
            db(report.snr_db_mean),
            db(report.snr_db_min)
        );
        text += &dense_text(plan);
        text += &files_text(plan);
        self.print(&text)
    }

    fn summary(self, plan: &Plan, summary: &DenseSummary, dst: &Path) -> Result<()> {
        if self.json {
            return self.document(summary);
        }
        if self.quiet {
            return Ok(());
        }
        self.print(&format!(
            "{}: {} weights decoded from {} {}\n  files      {} of {} bytes in all\n",
            dst.display(),
            summary.decoded.len(),
            summary.qtype,
            summary.layout,
            plan.files.len(),
            summary.bytes
        ))
    }

    fn plan(self, plan: &Plan, dst: Option<&Path>) -> Result<()> {
        let free = dst.map(free_bytes).transpose()?;
        if self.json {
            return self.document(&plan_document(plan, free));
        }
        let mut text = String::new();
        for item in &plan.items {
            let bytes: u64 = plan.tensors[item.outputs.clone()].iter().map(|tensor| tensor.len).sum();
            text += &match &item.work {
                Work::Encode(module) => format!(
                    "{}  {} {} [{}, {}] group {}  {} -> {} bytes\n",
                    module.report_name,
                    plan.scheme.qtype(),
                    scheme_text(plan),
                    module.shape.rows,
                    module.shape.columns,
                    module.shape.group,
                    item.work.bytes_in(),
                    bytes
                ),
                Work::Decode(decode) => {
                    let parts: Vec<&str> = decode.parts.iter().map(|part| part.name.as_str()).collect();
                    let name = &plan.tensors[item.outputs.start].name;
                    format!("{name}  {bytes} bytes from {}\n", parts.join(", "))
                }
                Work::Copy(dense) => format!("{}  dense: {}  {bytes} bytes\n", dense.name, dense.reason),
            };
        }
        let stored: u64 = plan.tensors.iter().map(|tensor| tensor.len).sum();
        text += &format!(
            "quantized  {} tensors, {:.2} % of the weights; {:.3} bits per weight over the whole checkpoint\n",
            plan.modules().count(),
            100.0 * plan.coverage(),
            8.0 * stored as f64 / (plan.weights as f64).max(1.0)
        );
        text += &files_text(plan);
        if let Some(free) = free {
            text += &format!("  free       {free} bytes at --dst, {} needed\n", plan.disk_bytes());
        }
        self.print(&text)
    }

    fn outcome(self, outcome: &Outcome, dst: &Path) -> Result<()> {
        if self.json {
            return self.document(outcome);
        }
        let mut text = String::new();
        for finding in &outcome.findings {
            text += &format!("FAULT {}: {}\n", finding.subject, finding.what);
        }
        // What was not checked is not chatter: it changes what exit code 0 means.
        if self.quiet {
            for note in &outcome.notes {
                let _ = writeln!(std::io::stderr(), "note: {note}");
            }
        } else {
            for note in &outcome.notes {
                text += &format!("note: {note}\n");
            }
            let verdict = match outcome.findings.len() {
                0 => "verified".to_string(),
                count => format!("{count} fault(s)"),
            };
            text += &format!(
                "{}: {verdict}; {} modules, {} tensors, {} hashes, {} compared with the source\n",
                dst.display(),
                outcome.modules,
                outcome.tensors,
                outcome.hashed,
                outcome.compared
            );
            if let (Some(mean), Some(min)) = (outcome.snr_db_mean, outcome.snr_db_min) {
                text += &format!("  SNR recomputed: mean {mean:.2} dB, least {min:.2} dB\n");
            }
        }
        self.print(&text)
    }
}

/// `gptq symmetric`
fn scheme_text(plan: &Plan) -> String {
    let grid = if plan.scheme.symmetric() {
        "symmetric"
    } else {
        "asymmetric"
    };
    format!("{} {grid}", plan.scheme.layout())
}

/// Dense tensors, a line per reason.
fn dense_text(plan: &Plan) -> String {
    let mut reasons: Vec<(&str, usize, &str)> = Vec::new();
    for dense in plan.dense() {
        match reasons.iter_mut().find(|(reason, ..)| *reason == dense.reason) {
            Some(entry) => entry.1 += 1,
            None => reasons.push((&dense.reason, 1, &dense.name)),
        }
    }
    let lines = reasons.iter().map(|(reason, count, first)| match count {
        1 => format!("  dense      {first}: {reason}\n"),
        _ => format!("  dense      {count} tensors ({first}, ..): {reason}\n"),
    });
    lines.collect()
}

fn files_text(plan: &Plan) -> String {
    let files = plan.files.len();
    format!(
        "  files      {files} of {} bytes in all, from {} bytes\n",
        plan.weight_bytes(),
        plan.source_bytes
    )
}

fn plan_document(plan: &Plan, free: Option<u64>) -> Value {
    let tensors = plan.items.iter().map(|item| {
        let outputs: Vec<Value> = plan.tensors[item.outputs.clone()]
            .iter()
            .map(|tensor| {
                let file = &plan.files[tensor.shard].name;
                json!({ "name": tensor.name, "dtype": tensor.dtype.to_string(), "shape": tensor.shape,
                        "bytes": tensor.len, "file": file })
            })
            .collect();
        match &item.work {
            Work::Encode(module) => json!({
                "name": module.report_name, "scheme": plan.scheme.qtype().to_string(),
                "layout": plan.scheme.layout(), "shape": [module.shape.rows, module.shape.columns],
                "group": module.shape.group, "outputs": outputs,
            }),
            Work::Decode(decode) => json!({
                "name": plan.tensors[item.outputs.start].name,
                "from": decode.parts.iter().map(|part| &part.name).collect::<Vec<_>>(),
                "outputs": outputs,
            }),
            Work::Copy(dense) => json!({ "name": dense.name, "dense": dense.reason, "outputs": outputs }),
        }
    });
    let files: Vec<Value> = plan
        .files
        .iter()
        .map(|file| json!({ "name": file.name, "bytes": file.len }))
        .collect();
    let stored: u64 = plan.tensors.iter().map(|tensor| tensor.len).sum();
    json!({
        "qtype": plan.scheme.qtype().to_string(),
        "layout": plan.scheme.layout(),
        "symmetric": plan.scheme.symmetric(),
        "group": plan.group,
        "tensors": tensors.collect::<Vec<_>>(),
        "files": files,
        "output_bytes": plan.output_bytes(),
        "source_bytes": plan.source_bytes,
        "coverage": plan.coverage(),
        "bits_per_weight": 8.0 * stored as f64 / (plan.weights as f64).max(1.0),
        "free_bytes": free,
    })
}
