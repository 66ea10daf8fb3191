//! What a container's process is started with: its arguments as the kubelet makes them, and the files that it finds.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;

use k8s_openapi::api::core::v1::{
    ConfigMap, Container, EnvVar, PersistentVolume, PersistentVolumeClaim, Pod, Secret, Volume,
};

use reqwest::Method;
use serde_json::{Value, json};

use crate::cluster::api::{Api, Client};

/// A pod of ours has one container; one of a test that wants no process has no command.
pub fn of(pod: &Pod) -> Option<&Container> {
    let container = pod.spec.as_ref()?.containers.first()?;
    program(container).map(|_| container)
}

/// The binary that a container runs.
pub fn program(container: &Container) -> Option<&str> {
    container.command.as_ref()?.first().map(String::as_str)
}

/// The arguments of a container: variables are replaced by their values, every interface by the pod's own address, and paths
/// in the container by those of files that `dir` now holds, or that the claim's volume names.
///
/// # Errors
/// What is missing, as a kubelet says it; it looks again.
pub async fn arguments(
    client: &Client,
    pod: &Pod,
    container: &Container,
    address: Ipv4Addr,
    dir: &Path,
) -> Result<Vec<String>, String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let objects = Objects { client, namespace };
    let mut variables = BTreeMap::new();
    let mut maps = BTreeMap::new();
    for variable in container.env.iter().flatten() {
        let value = objects.variable(variable, &mut maps).await?;
        variables.insert(format!("$({})", variable.name), value);
    }
    let mut paths = Vec::new();
    for mount in container.volume_mounts.iter().flatten() {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let volume = volumes.into_iter().find(|volume| volume.name == mount.name);
        let Some(volume) = volume else {
            return Err(format!("no volume {:?}", mount.name));
        };
        let here = objects.volume(volume, &dir.join(&mount.name)).await?;
        paths.push((format!("={}/", mount.mount_path), format!("={here}/")));
    }
    let argument = |arg: &String| {
        let mut arg = arg.replace("0.0.0.0", &address.to_string());
        for (from, to) in variables.iter().chain(paths.iter().map(|(from, to)| (from, to))) {
            arg = arg.replace(from, to);
        }
        arg
    };
    Ok(container.args.iter().flatten().map(argument).collect())
}

/// What stands for the token of a pod that has one: inside of a container it lies at a place that no argument names.
///
/// # Errors
/// What is missing, as a kubelet says it; it looks again.
pub async fn account(client: &Client, pod: &Pod, kubeconfig: &Value, dir: &Path) -> Result<Vec<String>, String> {
    let spec = pod.spec.clone().unwrap_or_default();
    if spec.automount_service_account_token != Some(true) {
        return Ok(Vec::new());
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let account = spec.service_account_name.unwrap_or_default();
    let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
    let request = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 24 * 3600},
    });
    let answer = client.call(Method::POST, &path, Some(&request)).await;
    let answer = answer.map_err(|refused| refused.to_string())?;
    let mut kubeconfig = kubeconfig.clone();
    kubeconfig["users"][0]["user"] = json!({"token": answer["status"]["token"]});
    let file = dir.join("kubeconfig");
    std::fs::create_dir_all(dir).expect("a folder");
    std::fs::write(&file, kubeconfig.to_string()).expect("a file");
    Ok(vec![
        format!("--namespace={namespace}"),
        format!("--kubeconfig={}", file.display()),
    ])
}

struct Objects<'a> {
    client: &'a Client,
    namespace: &'a str,
}

impl Objects<'_> {
    async fn variable(&self, of: &EnvVar, maps: &mut BTreeMap<String, ConfigMap>) -> Result<String, String> {
        let Some(from) = &of.value_from else {
            return Ok(of.value.clone().unwrap_or_default());
        };
        if let Some(key) = &from.config_map_key_ref {
            if !maps.contains_key(&key.name) {
                maps.insert(key.name.clone(), self.config_map(&key.name).await?);
            }
            let value = maps.get(&key.name).and_then(|map| map.data.as_ref()?.get(&key.key));
            return match value {
                Some(value) => Ok(value.clone()),
                None if key.optional == Some(true) => Ok(String::new()),
                None => Err(format!("couldn't find key {} in ConfigMap {}", key.key, key.name)),
            };
        }
        let Some(key) = &from.secret_key_ref else {
            return Err(format!("variable {} comes from nowhere", of.name));
        };
        let secret = self.secret(&key.name).await?;
        let value = secret.data.as_ref().and_then(|data| data.get(&key.key));
        let value = value.ok_or_else(|| format!("couldn't find key {} in Secret {}", key.key, key.name))?;
        String::from_utf8(value.0.clone()).map_err(|error| error.to_string())
    }

    /// Where a volume's files are.
    async fn volume(&self, volume: &Volume, dir: &Path) -> Result<String, String> {
        let write = |files: Vec<(String, Vec<u8>)>| {
            std::fs::create_dir_all(dir).expect("a folder");
            for (name, content) in files {
                std::fs::write(dir.join(name), content).expect("a file");
            }
            dir.display().to_string()
        };
        if let Some(secret) = &volume.secret {
            let secret = self.secret(secret.secret_name.as_deref().unwrap_or_default()).await?;
            let files = secret.data.unwrap_or_default().into_iter();
            return Ok(write(files.map(|(name, content)| (name, content.0)).collect()));
        }
        if let Some(map) = &volume.config_map {
            let map = self.config_map(&map.name).await?;
            let files = map.data.unwrap_or_default().into_iter();
            return Ok(write(
                files.map(|(name, content)| (name, content.into_bytes())).collect(),
            ));
        }
        if let Some(claim) = &volume.persistent_volume_claim {
            return self.host_path(&claim.claim_name).await;
        }
        Ok(write(Vec::new()))
    }

    async fn host_path(&self, claim: &str) -> Result<String, String> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client, self.namespace);
        let found = claims.get(claim).await.map_err(|refused| refused.to_string())?;
        let volume = found.spec.and_then(|spec| spec.volume_name);
        let volume = volume.ok_or_else(|| format!("claim {claim} is bound to no volume"))?;
        let volumes: Api<PersistentVolume> = Api::all(self.client);
        let found = volumes.get(&volume).await.map_err(|refused| refused.to_string())?;
        let path = found.spec.and_then(|spec| spec.host_path).map(|host| host.path);
        path.ok_or_else(|| format!("volume {volume} is no folder of this machine"))
    }

    async fn config_map(&self, name: &str) -> Result<ConfigMap, String> {
        let api: Api<ConfigMap> = Api::namespaced(self.client, self.namespace);
        api.get(name).await.map_err(|refused| refused.to_string())
    }

    async fn secret(&self, name: &str) -> Result<Secret, String> {
        let api: Api<Secret> = Api::namespaced(self.client, self.namespace);
        api.get(name).await.map_err(|refused| refused.to_string())
    }
}
