package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	gpuResource = "nvidia.com/gpu"
	gpuSocket   = "fp8rl-fake-gpu.sock"
	gpuPoll     = 200 * time.Millisecond
)

// gpuState is the state file: the GPUs that the node claims to have, and whether Allocate fails.
type gpuState struct {
	Devices []gpuDevice `json:"devices"`
	Fail    bool        `json:"fail"`
}

type gpuDevice struct {
	ID      string `json:"id"`
	NUMA    *int64 `json:"numa"`
	Healthy *bool  `json:"healthy"`
}

func readGPUState(path string) (gpuState, error) {
	var state gpuState
	text, err := os.ReadFile(path)
	if err != nil {
		return state, err
	}
	return state, json.Unmarshal(text, &state)
}

func (state gpuState) advertised() []*plugin.Device {
	devices := make([]*plugin.Device, 0, len(state.Devices))
	for _, d := range state.Devices {
		device := &plugin.Device{ID: d.ID, Health: plugin.Healthy}
		if d.Healthy != nil && !*d.Healthy {
			device.Health = plugin.Unhealthy
		}
		if d.NUMA != nil {
			device.Topology = &plugin.TopologyInfo{Nodes: []*plugin.NUMANode{{ID: *d.NUMA}}}
		}
		devices = append(devices, device)
	}
	return devices
}

// gpuPlugin stands for a driver's device plugin: the kubelet hands out its GPUs as it hands out real ones; each is /dev/null.
type gpuPlugin struct {
	plugin.UnimplementedDevicePluginServer
	statePath string
}

func (p *gpuPlugin) GetDevicePluginOptions(context.Context, *plugin.Empty) (*plugin.DevicePluginOptions, error) {
	return &plugin.DevicePluginOptions{}, nil
}

// ListAndWatch sends the devices whenever the state file says others. A file that cannot be read changes nothing.
func (p *gpuPlugin) ListAndWatch(_ *plugin.Empty, stream plugin.DevicePlugin_ListAndWatchServer) error {
	var sent *gpuState
	for stream.Context().Err() == nil {
		state, err := readGPUState(p.statePath)
		if err == nil && (sent == nil || !reflect.DeepEqual(*sent, state)) {
			if err := stream.Send(&plugin.ListAndWatchResponse{Devices: state.advertised()}); err != nil {
				return err
			}
			sent = &state
		}
		time.Sleep(gpuPoll)
	}
	return nil
}

func (p *gpuPlugin) Allocate(_ context.Context, request *plugin.AllocateRequest) (*plugin.AllocateResponse, error) {
	state, err := readGPUState(p.statePath)
	if err != nil || state.Fail {
		return nil, status.Error(codes.Internal, "the fake GPU plugin was told to fail")
	}
	response := &plugin.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		ids := append([]string(nil), container.DevicesIds...)
		sort.Strings(ids)
		allocated := &plugin.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids, ",")}}
		for _, id := range ids {
			path := "/dev/nvidia" + id[strings.LastIndex(id, "-")+1:]
			allocated.Devices = append(allocated.Devices, &plugin.DeviceSpec{ContainerPath: path, HostPath: "/dev/null", Permissions: "rw"})
		}
		response.ContainerResponses = append(response.ContainerResponses, allocated)
		fmt.Println("allocated", strings.Join(ids, ","))
	}
	return response, nil
}

// serve listens beside the kubelet's socket and registers with the kubelet.
func (p *gpuPlugin) serve(folder string) (*grpc.Server, error) {
	path := filepath.Join(folder, gpuSocket)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer()
	plugin.RegisterDevicePluginServer(server, p)
	go func() { _ = server.Serve(listener) }()
	if err := registerGPUs(filepath.Join(folder, "kubelet.sock")); err != nil {
		server.Stop()
		return nil, err
	}
	return server, nil
}

func registerGPUs(kubelet string) error {
	connection, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	request := &plugin.RegisterRequest{Version: plugin.Version, Endpoint: gpuSocket, ResourceName: gpuResource, Options: &plugin.DevicePluginOptions{}}
	_, err = plugin.NewRegistrationClient(connection).Register(ctx, request)
	return err
}

// fileID tells one kubelet's socket from the next one's: an inode is used again at once, a change time is not.
type fileID struct {
	inode       uint64
	changedSec  int64
	changedNsec int64
}

func identify(path string) (fileID, error) {
	var stat syscall.Stat_t
	if err := syscall.Stat(path, &stat); err != nil {
		return fileID{}, err
	}
	return fileID{stat.Ino, stat.Ctim.Sec, stat.Ctim.Nsec}, nil
}

// runGPUPlugin serves until it is killed: gpu-plugin FOLDER STATE, the kubelet's device-plugins folder and the state file.
// The kubelet empties the folder when it starts, and forgets who was registered.
func runGPUPlugin(folder, statePath string) {
	p := &gpuPlugin{statePath: statePath}
	var server *grpc.Server
	var known fileID
	for ; ; time.Sleep(gpuPoll) {
		kubelet, err := identify(filepath.Join(folder, "kubelet.sock"))
		if err != nil {
			continue
		}
		_, gone := os.Stat(filepath.Join(folder, gpuSocket))
		if kubelet == known && gone == nil {
			continue
		}
		if server != nil {
			server.Stop()
		}
		if server, err = p.serve(folder); err != nil {
			fmt.Println("not registered yet:", err)
			continue
		}
		known = kubelet
		fmt.Println("registered", gpuResource)
	}
}
