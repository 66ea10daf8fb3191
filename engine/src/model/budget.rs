//! Is there memory for a model, before it is loaded.

use std::fs;
use std::path::Path;

/// Bytes that this process may still take: what the machine has available, or what the memory limits of its control groups leave.
/// `None` where neither can be read.
pub(super) fn available_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_available(&text));
    let groups = fs::read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| cgroup_headroom(&text, Path::new("/sys/fs/cgroup")));
    match (machine, groups) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// `MemAvailable` of `/proc/meminfo`.
fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// The least that the limits of the process's v2 group and of the groups above it leave; page cache that can be dropped counts as free.
fn cgroup_headroom(proc_cgroup: &str, root: &Path) -> Option<u64> {
    let own = proc_cgroup.lines().find_map(|l| l.strip_prefix("0::/"))?;
    let mut dir = root.join(own.trim_end());
    let mut least = None;
    loop {
        let number = |file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
        if let (Some(max), Some(current)) = (number("memory.max"), number("memory.current")) {
            let cache = fs::read_to_string(dir.join("memory.stat"))
                .ok()
                .and_then(|s| {
                    s.lines()
                        .find_map(|l| l.strip_prefix("inactive_file ")?.trim().parse::<u64>().ok())
                })
                .unwrap_or(0);
            let left = max.saturating_sub(current.saturating_sub(cache));
            least = Some(least.map_or(left, |l: u64| l.min(left)));
        }
        if dir == root || !dir.pop() {
            return least;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24689232 kB\nMemFree:         1000 kB\nMemAvailable:   2048 kB\n";
        assert_eq!(meminfo_available(text), Some(2048 * 1024));
        assert_eq!(meminfo_available("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn the_tightest_group_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let (outer, inner) = (root.path().join("pod"), root.path().join("pod/engine"));
        fs::create_dir_all(&inner).unwrap();
        fs::write(outer.join("memory.max"), "1000\n").unwrap();
        fs::write(outer.join("memory.current"), "700\n").unwrap();
        fs::write(outer.join("memory.stat"), "anon 1\ninactive_file 100\n").unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(inner.join("memory.current"), "700\n").unwrap();
        assert_eq!(cgroup_headroom("0::/pod/engine\n", root.path()), Some(400));
        fs::write(inner.join("memory.max"), "800\n").unwrap();
        assert_eq!(cgroup_headroom("0::/pod/engine\n", root.path()), Some(100));
        assert_eq!(cgroup_headroom("0::/other\n", root.path()), None);
    }
}
