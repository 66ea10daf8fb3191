//! Whether the machine has the memory that the engines will ask for, before any of them starts.

const MIB: u64 = 1 << 20;
/// Code, tables and buffers of one engine beside weights and KV cache; the router with its tokenizer is of this size too.
const PROCESS_MIB: u64 = 128;

/// What the engines will need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    pub engines: u64,
    pub kv_mib: u64,
    /// The model's files; each engine keeps the weights in a layout of its own, so they count once per engine.
    pub model_mib: u64,
}

impl Need {
    pub fn new(engines: usize, kv_mib: u32, model_bytes: u64) -> Self {
        Self {
            engines: engines as u64,
            kv_mib: kv_mib.into(),
            model_mib: model_bytes.div_ceil(MIB),
        }
    }

    fn total_mib(self) -> u64 {
        self.engines * (self.kv_mib + self.model_mib + PROCESS_MIB) + PROCESS_MIB
    }

    /// Refuses when less than this is available. Unknown availability refuses nothing.
    pub fn check(self, available_mib: Option<u64>) -> Result<(), String> {
        let total = self.total_mib();
        match available_mib {
            Some(available) if available < total => Err(format!(
                "too little memory: {} engines with {} MiB of KV cache and {} MiB of weights each, and the router, need \
                 {total} MiB, {available} MiB are available; lower --kv-memory-mib, run fewer replicas, or free memory",
                self.engines, self.kv_mib, self.model_mib
            )),
            _ => Ok(()),
        }
    }
}

/// What this process and its children may still take, by the kernel's estimate and the cgroup's limit.
pub fn available_mib() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").as_deref().and_then(mem_available_mib);
    let cgroup = read("/proc/self/cgroup")
        .as_deref()
        .and_then(cgroup_path)
        .and_then(|path| {
            let number = |file: &str| {
                read(&format!("/sys/fs/cgroup{path}/{file}"))?
                    .trim()
                    .parse::<u64>()
                    .ok()
            };
            Some(number("memory.max")?.saturating_sub(number("memory.current")?) / MIB)
        });
    [machine, cgroup].into_iter().flatten().min()
}

fn mem_available_mib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? / 1024)
}

/// The path of a cgroup v2 line, `0::/path`.
fn cgroup_path(cgroup: &str) -> Option<String> {
    cgroup
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .map(|path| path.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_is_refused_with_both_figures() {
        let need = Need::new(2, 512, 90 * MIB + 1);
        assert_eq!(need.total_mib(), 2 * (512 + 91 + 128) + 128);
        let error = need.check(Some(1589)).unwrap_err();
        assert!(
            error.contains("need 1590 MiB, 1589 MiB are available; lower --kv-memory-mib"),
            "{error}"
        );
        need.check(Some(1590)).unwrap();
        need.check(None).unwrap();
    }

    #[test]
    fn the_kernels_files_are_read() {
        assert_eq!(
            mem_available_mib("MemTotal: 100 kB\nMemAvailable:    2097152 kB\n"),
            Some(2048)
        );
        assert_eq!(mem_available_mib("MemTotal: 100 kB\n"), None);
        assert_eq!(
            cgroup_path("1:name=x:/y\n0::/user.slice\n").as_deref(),
            Some("/user.slice")
        );
        assert_eq!(cgroup_path("0::/\n").as_deref(), Some(""));
        assert!(available_mib().is_some_and(|mib| mib > 16), "this machine's own files");
    }
}
