// Command kube is the control plane of a small Kubernetes in one binary: the name it is called by (a symlink's), or else its first
// argument, picks the part. Tests run it; nothing that is shipped knows it.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

var parts = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": manager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubectl":                 func() *cobra.Command { return kubectl.NewDefaultKubectlCommand() },
}

func main() {
	part := filepath.Base(os.Args[0])
	if part != "etcd" && parts[part] == nil && len(os.Args) > 1 {
		part = os.Args[1]
		os.Args = os.Args[1:]
	}
	if part == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command := parts[part]
	if command == nil {
		fmt.Fprintf(os.Stderr, "kube: no part %q; there are etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl\n",
			strings.ToValidUTF8(part, "?"))
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
