// Command node is all of Kubernetes that a test cluster runs, in one binary that looks at the name it was started by.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	etcd "go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "etcd":
		etcd.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllers.NewControllerManagerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kube-proxy":
		os.Exit(cli.Run(proxy.NewProxyCommand()))
	case "kubelet":
		os.Exit(cli.Run(kubelet.NewKubeletCommand(context.Background())))
	case "kubectl":
		os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
	case "gpu-plugin":
		need(3, "gpu-plugin FOLDER STATE")
		runGPUPlugin(os.Args[1], os.Args[2])
	case "podresources":
		need(2, "podresources SOCKET")
		if err := printPodResources(os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	default:
		fmt.Fprintln(os.Stderr, name+": start it by the name of a part of Kubernetes, gpu-plugin or podresources")
		os.Exit(2)
	}
}

func need(arguments int, usage string) {
	if len(os.Args) != arguments {
		fmt.Fprintln(os.Stderr, "usage:", usage)
		os.Exit(2)
	}
}
