// Command node is what runs on the nodes of a small Kubernetes, and its DNS server, in one binary: the name it is called by (a
// symlink's), or else its first argument, picks the part. Tests and `make cluster-up` run it; nothing that is shipped knows it.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/coredns/coredns/coremain"
	// All that a cluster's own names need; the full set brings in the SDKs of every cloud.
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	// Without these two the metrics of API clients are missing.
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var parts = map[string]func() *cobra.Command{
	"kubelet":    func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kube-proxy": proxy.NewProxyCommand,
}

func main() {
	part := filepath.Base(os.Args[0])
	if part != "coredns" && parts[part] == nil && len(os.Args) > 1 {
		part = os.Args[1]
		os.Args = os.Args[1:]
	}
	if part == "coredns" {
		coremain.Run()
		return
	}
	command := parts[part]
	if command == nil {
		fmt.Fprintf(os.Stderr, "node: no part %q; there are kubelet, kube-proxy, coredns\n", strings.ToValidUTF8(part, "?"))
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
